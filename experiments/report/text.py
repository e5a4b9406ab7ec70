"""Blocks as plain text for a terminal: aligned tables, wrapped paragraphs, drawings as the numbers they show."""

import textwrap
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
    Section,
    Table,
    Verdict,
    visible,
    visible_lines,
)

WIDTH = 100
CELL = 60  # a longer cell is wrapped
MARK = (">>>", "<<<")  # around the first differing token


def render_text(blocks: Sequence[Block]) -> str:
    """The blocks, an empty line between two."""
    return "\n\n".join(part for part in map(_block, blocks) if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case Paragraph(text) | Verdict(text):
            return textwrap.fill(visible(text), WIDTH)
        case Alert(text, label):
            return textwrap.fill(f"{label.upper()}: {visible(text)}", WIDTH)
        case Table():
            return _table(block)
        case Figure():
            return f"{textwrap.fill(visible(block.caption), WIDTH)}\n\n{_table(block.data)}"
        case Passages(caption, passages):
            return "\n\n".join([visible(caption), *map(_passage, passages)])
        case Section():
            return f"{visible(block.title)}\n{'-' * len(visible(block.title))}\n\n{render_text(block.blocks).rstrip()}"


def _passage(passage: Passage) -> str:
    whole = "".join(
        f"{MARK[0]}{visible_lines(span.text)}{MARK[1]}" if span.kind == "mark" else visible_lines(span.text)
        for span in passage.spans
    )
    lines = [piece for line in whole.split("\n") for piece in (textwrap.wrap(line, WIDTH - 4) or [""])]
    return "\n".join([f"  {visible(passage.label)}", *(f"  | {line}" for line in lines)])


def _table(table: Table) -> str:
    cells = [[textwrap.wrap(_cell(cell), CELL) or [""] for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(line) for row in cells for line in row[k]) for k in range(len(table.header))]
    lines = []
    for row in cells:
        for n in range(max(map(len, row))):
            parts = (cell[n] if n < len(cell) else "" for cell in row)
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths)).rstrip())
    rule = "  ".join("-" * width for width in widths)
    depth = max(map(len, cells[0]))
    return "\n".join([visible(table.caption), *lines[:depth], rule, *lines[depth:]])


def _cell(cell: Cell) -> str:
    return visible(cell.text if isinstance(cell, Link) else cell)
