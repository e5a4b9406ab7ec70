"""The report on disk: Markdown with its drawings beside it, and one HTML page that works from a file, in print and in
dark mode, and refers to nothing outside.

The page ends with a list of rows, filtered and sorted by the script of page.html. A row's blocks are part of the page
up to EMBEDDED_ROWS rows and EMBEDDED_CHARACTERS in all. Every further row has a script file beside the page, loaded
when it is opened: a page opened as a file may load scripts, and no other files.
"""

import base64
import hashlib
import html
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template

from experiments.report.blocks import (
    Alert,
    Block,
    Cell,
    Figure,
    Link,
    Paragraph,
    Passage,
    Passages,
    Report,
    RowEntry,
    Section,
    Table,
    Verdict,
    visible,
)
from experiments.report.charts import VARIABLES, standalone
from experiments.report.plain import FIGURES, render_markdown
from experiments.run.ledger import write_whole

EMBEDDED_ROWS, EMBEDDED_CHARACTERS = 200, 3_500_000
ROWS = "rows"  # folder of the script files, beside the page
ROW_CALL = "stageReplayRow("  # with which each of them starts
FILTERS = {"diverged": "suffixes part", "answer": "answer changed", "gate": "a gate failed"}
SORTS = {"": "ledger order", "first": "first divergence", "margin": "margin", "drift": "drift, largest first"}
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# What the page may load, a second line of defence behind the escaping: its own script, and row files beside it.
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}' 'self' file:"


def write_report(report: Report, out: Path) -> Path:
    """Writes report.md, its drawings under figures/, report.html and its row files; returns the page's path."""
    page, files = render_html(report)
    files |= {f"{FIGURES}/{figure.name}.svg": standalone(figure.svg) for figure in _figures(report.blocks)}
    for name, text in {**files, "report.md": render_markdown(report), "report.html": page}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
    for folder, mark in ((ROWS, ROW_CALL.rstrip("(")), (FIGURES, VARIABLES)):
        for path in (out / folder).iterdir() if (out / folder).is_dir() else ():
            if f"{folder}/{path.name}" not in files and path.is_file() and not path.is_symlink():
                with path.open("rb") as file:  # only what an earlier report wrote is removed
                    own = mark.encode() in file.read(4096)
                if own:
                    path.unlink()
    return out / "report.html"


def _figures(blocks: Sequence[Block]) -> list[Figure]:
    inner = [_figures(one.blocks) if isinstance(one, Section) else [one] for one in blocks]
    return [one for found in inner for one in found if isinstance(one, Figure)]


def render_html(report: Report) -> tuple[str, dict[str, str]]:
    """Returns the page, and the files that it loads when rows in them are opened, by their paths beside the page."""
    links = [Link(one.title, one.anchor) for one in report.blocks if isinstance(one, Section)]
    links += [Link("Rows", ROWS)] if report.rows else []
    rows, files = _browser(report.rows) if report.rows else ("", {})
    return Template(PAGE).substitute(
        policy=POLICY,
        title=_escaped(report.title),
        variables=VARIABLES,
        contents="".join(_element("li", _cell(link)) for link in links),
        body=f"{_blocks(report.blocks, 2, '')}\n{rows}",
    ), files


def _escaped(text: str, lines: bool = False) -> str:
    return html.escape(visible(text, lines), quote=True)


def _element(tag: str, content: str, **attributes: str) -> str:
    """An element around HTML; attributes are plain text, an empty one is left out."""
    named = [f' {key.strip("_").replace("_", "-")}="{_escaped(value)}"' for key, value in attributes.items() if value]
    return f"<{tag}{''.join(named)}>{content}</{tag}>"


def _cell(cell: Cell) -> str:
    return _element("a", _escaped(cell.text), href=f"#{cell.anchor}") if isinstance(cell, Link) else _escaped(cell)


def _blocks(blocks: Sequence[Block], level: int, within: str) -> str:
    """Neighbouring figures share a line where the page is wide enough."""
    parts = []
    for drawn, members in itertools.groupby(blocks, lambda block: isinstance(block, Figure)):
        made = "\n".join(_block(block, level, within) for block in members)
        parts.append(_element("div", made, class_="figures") if drawn else made)
    return "\n".join(parts)


def _block(block: Block, level: int, within: str) -> str:
    """One block. within: the title of its section, part of a table's accessible name."""
    match block:
        case Paragraph(text):
            return _element("p", _escaped(text))
        case Alert(text, label):
            content = f"{_element('strong', f'{_escaped(label)}:')} {_escaped(text)}"
            return _element("p", content, class_="alert" if label == "Failed" else "mild")
        case Verdict(text):
            return _element("p", _escaped(text), class_="verdict")
        case Table():
            return _folded(block.caption, _table(block, within)) if block.folded else _table(block, within)
        case Figure():
            label = f'<svg role="img" aria-label="{_escaped(block.alternative)}"'
            drawing = block.svg.replace("<svg", label, 1)
            data = _folded("The numbers of this figure", _table(block.data, within))
            content = f"{drawing}\n{_element('figcaption', _escaped(block.caption))}\n{data}"
            whole = {"class_": "whole", "tabindex": "0"} if block.wide else {}
            return _element("figure", content, id=f"figure-{block.name}", **whole)
        case Passages(caption, passages):
            above, beside = (passages[:1], passages[1:]) if block.columns else (passages, ())
            parts = [_element(f"h{level}", _escaped(caption)), *map(_passage, above)]
            parts += [_element("div", "\n".join(map(_passage, beside)), class_="columns")] if beside else []
            return _element("div", "\n".join(parts), role="group", aria_label=caption)
        case Section(title, anchor, blocks):
            heading = _element(f"h{min(level, 6)}", _escaped(title), id=f"{anchor}-title")
            content = f"{heading}\n{_blocks(blocks, level + 1, title)}"
            return _element("section", content, id=anchor, aria_labelledby=f"{anchor}-title")


def _passage(passage: Passage) -> str:
    """The text under its label, in the colour of its block; the first differing token is a <mark>."""
    tags = {"mark": "mark", "special": "kbd"}
    pieces = ((span.kind, _escaped(span.text, lines=True)) for span in passage.spans)
    text = "".join(_element(tags[kind], piece) if kind else piece for kind, piece in pieces)
    content = f"{_element('b', _escaped(passage.label))}{_element('p', text)}"
    return _element("div", content, class_="passage", style=f"border-color: var(--{passage.colour})")


def _table(table: Table, within: str) -> str:
    head = "".join(_element("th", _cell(cell), scope="col") for cell in table.header)
    lines = [
        _element("th", _cell(row[0]), scope="row") + "".join(_element("td", _cell(cell)) for cell in row[1:])
        for row in table.rows
    ]
    body = "\n".join(_element("tr", line) for line in lines)
    content = f"{_element('caption', _escaped(table.caption))}\n{_element('thead', _element('tr', head))}\n"
    drawn = _element("table", f"{content}{_element('tbody', body)}", class_="wide" if len(table.header) > 4 else "")
    return _element("div", drawn, class_="scroll", role="region", tabindex="0", aria_label=f"{within}: {table.caption}")


def _folded(summary: str, content: str) -> str:
    return _element("details", f"{_element('summary', _escaped(summary))}\n{content}")


def _browser(rows: Sequence[RowEntry]) -> tuple[str, dict[str, str]]:
    """The list of rows, and the script files by path."""
    runs = list(dict.fromkeys(row.run for row in rows))
    items, files, held = [], {}, 0
    for number, row in enumerate(rows):
        body, file = _blocks(row.blocks, 3, ""), ""
        if number < EMBEDDED_ROWS and held + len(body) <= EMBEDDED_CHARACTERS:
            held += len(body)
        else:
            file = f"{ROWS}/{number}.js"
            files[file] = f"{ROW_CALL}{json.dumps(row.anchor)}, {json.dumps(body)});\n"
            body = f"<p>Stands in {file} beside this page; loaded when opened, where scripts may run.</p>"
        line = _element("b", _escaped(row.key)) + "".join(
            _element("span", _escaped(one)) for one in (row.run, *row.facts)
        )
        body = _element("div", body, data_file=file, aria_live="polite" if file else "")
        details = _element("details", f"{_element('summary', line)}\n{body}", id=row.anchor)
        order = {f"data_{key}": repr(value) for key, value in row.order.items()}
        flags = " ".join(sorted(row.flags)) or "none"
        items.append(_element("li", details, data_run=str(runs.index(row.run)), data_flags=flags, **order))
    content = (
        '<h2 id="rows-title">Rows, one by one</h2>\n'
        "<p>Open a row for its question, its branches, the suffixes with the first differing token marked, margins, "
        "answers, drift by layer and mask. The same on a terminal: python -m experiments.show RUN ROW.</p>\n"
        f"{_form(runs)}\n"
    ) + _element("ul", "\n".join(items), id="row-list")
    return _element("section", content, id=ROWS, aria_labelledby="rows-title"), files


def _form(runs: Sequence[str]) -> str:
    """Filters and order; shown by the script, without which they could do nothing."""
    boxes = "".join(f'<label><input type="checkbox" value="{key}"> {label}</label>' for key, label in FILTERS.items())
    sorts = "".join(f'<option value="{key}">{label}</option>' for key, label in SORTS.items())
    names = "".join(f'<option value="{k}">{_escaped(name)}</option>' for k, name in enumerate(runs))
    return (
        '<form id="row-filters" hidden aria-label="Filter and sort the rows">\n'
        f'<label>run <select name="run"><option value="">all</option>{names}</select></label>\n'
        f"<fieldset><legend>only rows where</legend>{boxes}</fieldset>\n"
        f'<label>order <select name="sort">{sorts}</select></label>\n'
        '<p id="row-count" role="status"></p>\n</form>'
    )
