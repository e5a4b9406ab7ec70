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

from experiments.report import blocks as kinds
from experiments.report.blocks import Block, Cell, Link, Report, RowEntry, visible
from experiments.report.charts import VARIABLES, missing, standalone
from experiments.report.plain import FIGURES, render_markdown
from experiments.run.directory import MANIFEST
from experiments.run.ledger import write_whole
from minimodel.errors import InputError

EMBEDDED_ROWS, EMBEDDED_CHARACTERS = 200, 3_500_000
ROWS = "rows"  # folder of the script files, beside the page
ROW_CALL = "stageReplayRow"  # the function that each of them calls
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# What the page may load, a second line of defence behind the escaping: its own script, and row files beside it.
POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}' 'self' file:"


def write_report(report: Report, out: Path) -> Path:
    """Writes report.md, its drawings under figures/, report.html and its row files; returns the page's path. InputError
    where `out` is a run directory, whose own report.md would be overwritten."""
    if (out / MANIFEST).exists():
        raise InputError(f"{out}: expected a directory that is no run, found {MANIFEST}; choose another --out")
    drawn = {f"{FIGURES}/{figure.name}.svg": figure.svg for figure in _figures(report.blocks)}
    if not all(drawn.values()):
        report = report._replace(blocks=(kinds.Alert(f"No charts: {missing()}.", "Note"), *report.blocks))
    page, files = render_html(report)
    files |= {name: standalone(svg) for name, svg in drawn.items() if svg}
    for name, text in {**files, "report.md": render_markdown(report), "report.html": page}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
    for folder, mark in ((ROWS, ROW_CALL), (FIGURES, VARIABLES)):  # what an earlier report wrote is removed
        for path in (out / folder).glob("*"):
            left = f"{folder}/{path.name}" not in files and path.is_file() and not path.is_symlink()
            if left and mark.encode() in path.read_bytes()[:4096]:
                path.unlink()
    return out / "report.html"


def _figures(blocks: Sequence[Block]) -> list[kinds.Figure]:
    inner = [_figures(one.blocks) if isinstance(one, kinds.Section) else [one] for one in blocks]
    return [one for found in inner for one in found if isinstance(one, kinds.Figure)]


def render_html(report: Report) -> tuple[str, dict[str, str]]:
    """Returns the page, and the files that it loads when rows in them are opened, by their paths beside the page."""
    links = [Link(one.title, one.anchor) for one in report.blocks if isinstance(one, kinds.Section)]
    links += [Link("Rows", ROWS)] if report.rows else []
    runs = list(dict.fromkeys(row.run for row in report.rows))
    items, files = _items(report.rows, runs)
    page = Template(PAGE).substitute(
        policy=POLICY,
        title=_escaped(report.title),
        variables=VARIABLES,
        contents="".join(_element("li", _cell(link)) for link in links),
        body=_blocks(report.blocks, 2, ""),
        hidden="" if report.rows else "hidden",
        runs="".join(f'<option value="{k}">{_escaped(name)}</option>' for k, name in enumerate(runs)),
        rows=items,
    )
    return page, files


def _items(rows: Sequence[RowEntry], runs: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Returns the items of the list of rows, and the script files by path."""
    items, files, held = [], {}, 0
    for number, row in enumerate(rows):
        body, file = _blocks(row.blocks, 3, row.key), ""
        if number < EMBEDDED_ROWS and held + len(body) <= EMBEDDED_CHARACTERS:
            held += len(body)
        else:
            file = f"{ROWS}/{number}.js"
            files[file] = f"{ROW_CALL}({json.dumps(row.anchor)}, {json.dumps(body)});\n"
            body = f"<p>Stands in {file} beside this page; loaded when opened, where scripts may run.</p>"
        line = _element("b", _escaped(row.key)) + "".join(_element("span", _escaped(t)) for t in (row.run, *row.facts))
        body = _element("div", body, data_file=file, aria_live="polite" if file else "")
        details = _element("details", f"{_element('summary', line)}\n{body}", id=row.anchor)
        order = {f"data_{key}": repr(value) for key, value in row.order.items()}
        flags = " ".join(sorted(row.flags)) or "none"
        items.append(_element("li", details, data_run=str(runs.index(row.run)), data_flags=flags, **order))
    return "\n".join(items), files


def _escaped(text: str, lines: bool = False) -> str:
    return html.escape(visible(text, lines), quote=True)


def _element(tag: str, content: str, **attributes: str) -> str:
    """Returns an element around HTML. Attributes are plain text; an empty one is left out."""
    named = [f' {key.strip("_").replace("_", "-")}="{_escaped(value)}"' for key, value in attributes.items() if value]
    return f"<{tag}{''.join(named)}>{content}</{tag}>"


def _cell(cell: Cell) -> str:
    return _element("a", _escaped(cell.text), href=f"#{cell.anchor}") if isinstance(cell, Link) else _escaped(cell)


def _blocks(blocks: Sequence[Block], level: int, within: str) -> str:
    """Returns the blocks. Neighbouring figures share a line where the page is wide enough."""
    parts = []
    for drawn, members in itertools.groupby(blocks, lambda block: isinstance(block, kinds.Figure)):
        made = "\n".join(_block(block, level, within) for block in members)
        parts.append(_element("div", made, class_="figures") if drawn else made)
    return "\n".join(parts)


def _block(block: Block, level: int, within: str) -> str:
    """Returns one block. within: the title of its section, part of a table's accessible name."""
    match block:
        case kinds.Paragraph(text):
            return _element("p", _escaped(text))
        case kinds.Alert(text, label):
            content = f"{_element('strong', f'{_escaped(label)}:')} {_escaped(text)}"
            return _element("p", content, class_="alert" if label == "Failed" else "mild")
        case kinds.Verdict(text):
            return _element("p", _escaped(text), class_="verdict")
        case kinds.Table():
            return _folded(block.caption, _table(block, within)) if block.folded else _table(block, within)
        case kinds.Figure():
            drawing = block.svg.replace("<svg", f'<svg role="img" aria-label="{_escaped(block.alternative)}"', 1)
            data = _folded("The numbers of this figure", _table(block.data, within))
            content = f"{drawing}\n{_element('figcaption', _escaped(block.caption))}\n{data}"
            whole = {"class_": "whole", "tabindex": "0"} if block.wide else {}
            return _element("figure", content, id=f"figure-{block.name}", **whole)
        case kinds.Passages(caption, passages):
            above, beside = (passages[:1], passages[1:]) if block.columns else (passages, ())
            parts = [_element(f"h{level}", _escaped(caption)), *map(_passage, above)]
            parts += [_element("div", "\n".join(map(_passage, beside)), class_="columns")] if beside else []
            return _element("div", "\n".join(parts), role="group", aria_label=caption)
        case kinds.Section(title, anchor, blocks):
            heading = _element(f"h{min(level, 6)}", _escaped(title), id=f"{anchor}-title")
            content = f"{heading}\n{_blocks(blocks, level + 1, title)}"
            return _element("section", content, id=anchor, aria_labelledby=f"{anchor}-title")


def _passage(passage: kinds.Passage) -> str:
    """Returns a text under its label, in the colour of its block; the first differing token is a <mark>."""
    tags = {"mark": "mark", "special": "kbd"}
    pieces = ((span.kind, _escaped(span.text, lines=True)) for span in passage.spans)
    text = "".join(_element(tags[kind], piece) if kind else piece for kind, piece in pieces)
    content = f"{_element('b', _escaped(passage.label))}{_element('p', text)}"
    return _element("div", content, class_="passage", style=f"border-color: var(--{passage.colour})")


def _table(table: kinds.Table, within: str) -> str:
    head = "".join(_element("th", _cell(cell), scope="col") for cell in table.header)
    lines = (
        _element("th", _cell(row[0]), scope="row") + "".join(_element("td", _cell(cell)) for cell in row[1:])
        for row in table.rows
    )
    body = _element("tbody", "\n".join(_element("tr", line) for line in lines))
    content = f"{_element('caption', _escaped(table.caption))}{_element('thead', _element('tr', head))}\n{body}"
    drawn = _element("table", content, class_="wide" if len(table.header) > 4 else "")
    return _element("div", drawn, class_="scroll", role="region", tabindex="0", aria_label=f"{within}: {table.caption}")


def _folded(summary: str, content: str) -> str:
    return _element("details", f"{_element('summary', _escaped(summary))}\n{content}")
