"""The report as an HTML page: no outside reference, works from a file, in print and in dark mode."""

import html
import itertools
from collections.abc import Sequence

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
    Section,
    Table,
    Verdict,
    escaped,
    visible_lines,
)
from experiments.report.browser import browser, script_digest
from experiments.report.style import STYLE

# What the page may load, a second line of defence behind the escaping: its own script, and row files beside it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
ROWS_POLICY = f"{POLICY}; script-src '{script_digest()}' 'self' file:"


def render_html(report: Report) -> tuple[str, dict[str, str]]:
    """The page, and the files that it loads when rows in them are opened, by their paths beside the page."""
    sections = [block for block in report.blocks if isinstance(block, Section)]
    links = [Link(one.title, one.anchor) for one in sections] + ([Link("Rows", "rows")] if report.rows else [])
    contents = "".join(f"<li>{_cell(link)}</li>" for link in links)
    body = _blocks(report.blocks, 2, "")
    rows, files = browser(report.rows, lambda blocks: _blocks(blocks, 3, "")) if report.rows else ("", {})
    title = escaped(report.title)
    page = (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{ROWS_POLICY if report.rows else POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1></header>\n"
        f'<nav aria-label="Contents"><ol>{contents}</ol></nav>\n'
        f"<main>\n{body}\n{rows}\n</main>\n</body>\n</html>\n"
    )
    return page, files


def _cell(cell: Cell) -> str:
    if isinstance(cell, Link):
        return f'<a href="#{escaped(cell.anchor)}">{escaped(cell.text)}</a>'
    return escaped(cell)


def _block(block: Block, level: int, within: str) -> str:
    """One block. within: the title of its section, part of a table's accessible name."""
    match block:
        case Paragraph(text):
            return f"<p>{escaped(text)}</p>"
        case Alert(text, label):
            kind = "alert" if label == "Failed" else "alert mild"
            return f'<p class="{kind}"><strong>{escaped(label)}:</strong> {escaped(text)}</p>'
        case Verdict(text):
            return f'<p class="verdict">{escaped(text)}</p>'
        case Table():
            return _folded(block.caption, _table(block, within)) if block.folded else _table(block, within)
        case Figure():
            return _figure(block, within)
        case Passages():
            return _passages(block)
        case Section():
            return _section(block, level)


def _section(section: Section, level: int) -> str:
    tag = f"h{min(level, 6)}"
    anchor = escaped(section.anchor)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n'
        f'<{tag} id="{anchor}-title">{escaped(section.title)}</{tag}>\n'
        f"{_blocks(section.blocks, level + 1, section.title)}\n</section>"
    )


def _passages(block: Passages) -> str:
    """Each passage under its label, in the colour of its block; the marked token is a <mark>."""
    above, beside = (block.passages[:1], block.passages[1:]) if block.columns else (block.passages, ())
    parts = "\n".join(map(_passage, above))
    if beside:
        parts += '\n<div class="columns">\n' + "\n".join(map(_passage, beside)) + "\n</div>"
    caption = escaped(block.caption)
    return f'<div class="passages" role="group" aria-label="{caption}">\n<h3>{caption}</h3>\n{parts}\n</div>'


def _passage(passage: Passage) -> str:
    tags = {"mark": "mark", "special": "kbd"}
    text = "".join(
        f"<{tags[span.kind]}>{_lines(span.text)}</{tags[span.kind]}>" if span.kind else _lines(span.text)
        for span in passage.spans
    )
    return (
        f'<div class="passage" style="border-color: var(--{passage.colour})"><b>{escaped(passage.label)}</b>'
        f"<p>{text}</p></div>"
    )


def _lines(text: str) -> str:
    return html.escape(visible_lines(text), quote=True)


def _blocks(blocks: Sequence[Block], level: int, within: str) -> str:
    """Neighbouring figures share a line where the page is wide enough."""
    parts = []
    for drawn, members in itertools.groupby(blocks, lambda block: isinstance(block, Figure)):
        made = "\n".join(_block(block, level, within) for block in members)
        parts.append(f'<div class="figures">\n{made}\n</div>' if drawn else made)
    return "\n".join(parts)


def _table(table: Table, within: str) -> str:
    caption = escaped(table.caption)
    wide = ' class="wide"' if len(table.header) > 4 else ""
    header = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in table.header)
    rows = "\n".join(
        "<tr>"
        + f'<th scope="row">{_cell(row[0])}</th>'
        + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(within)}: {caption}">\n'
        f"<table{wide}>\n<caption>{caption}</caption>\n"
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{escaped(summary)}</summary>\n{content}\n</details>"


def _figure(figure: Figure, within: str) -> str:
    """The drawing, its caption, and its numbers on demand; without a drawing, the numbers."""
    whole = ' class="whole" tabindex="0"' if figure.wide else ""
    drawing, data = "", _table(figure.data, within)
    if figure.svg:
        label = f'<svg role="img" aria-label="{escaped(figure.alternative)}"'
        drawing, data = figure.svg.replace("<svg", label, 1), _folded("The numbers of this figure", data)
    return (
        f'<figure id="figure-{escaped(figure.name)}"{whole}>\n{drawing}\n'
        f"<figcaption>{escaped(figure.caption)}</figcaption>\n{data}\n</figure>"
    )
