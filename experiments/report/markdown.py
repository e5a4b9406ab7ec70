"""The report as Markdown; drawings are files beside it."""

import re

from experiments.report.blocks import (
    Alert,
    Block,
    Cell,
    Figure,
    Link,
    Paragraph,
    Passages,
    Report,
    Section,
    Table,
    Verdict,
    table,
    visible,
)

FIGURES = "figures"  # the folder of the drawings, beside report.md
_SPECIAL = re.compile(r"[\\`*\[\]<>|&#~$]|(?<![^\W_])_|_(?![^\W_])")


def render_markdown(report: Report, drawings: bool = True) -> str:
    """The whole document. drawings: whether figures link to their files under figures/; their tables stand anyway."""
    parts = [f"# {_text(report.title)}", *(_block(block, 2, drawings) for block in report.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    """Plain text: nothing in it is markup. An underscore between letters is none, and stays readable."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], visible(text))


def _cell(cell: Cell) -> str:
    return _text(cell.text if isinstance(cell, Link) else cell)


def _block(block: Block, level: int, drawings: bool) -> str:
    match block:
        case Paragraph(text) | Verdict(text):
            return _text(text)
        case Alert(text, label):
            return f"> **{_text(label.upper())}:** {_text(text)}"
        case Table():
            return "" if block.folded else markdown_table(block)
        case Figure():
            return _figure(block, drawings)
        case Passages(caption, passages):
            lines = [[one.label, "".join(span.text for span in one.spans)] for one in passages]
            return markdown_table(table(caption, ["part", "text"], lines))
        case Section():
            inner = [_block(inner, level + 1, drawings) for inner in block.blocks]
            return "\n\n".join([f"{'#' * min(level, 6)} {_text(block.title)}", *(part for part in inner if part)])


def markdown_table(table: Table) -> str:
    """The caption in bold, and the rows."""
    lines = [table.header, *table.rows]
    drawn = ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines]
    return "\n".join([f"**{_text(table.caption)}**", "", drawn[0], "|" + " --- |" * len(table.header), *drawn[1:]])


def _figure(figure: Figure, drawings: bool) -> str:
    drawing = f"![{_text(figure.alternative)}]({FIGURES}/{figure.name}.svg)\n\n" if drawings and figure.svg else ""
    return f"{drawing}{_text(figure.caption)}\n\n{markdown_table(figure.data)}"
