"""Blocks as Markdown, with drawings as files beside it, and as text for a terminal."""

import re
import textwrap
from collections.abc import Sequence

from experiments.report.blocks import (
    Alert,
    Block,
    Figure,
    Paragraph,
    Passage,
    Passages,
    Report,
    Section,
    Table,
    Verdict,
    table,
    visible,
)

FIGURES = "figures"  # folder of the drawings, beside report.md
WIDTH, CELL = 100, 60  # of a terminal's line, and of the longest line in a cell of a table
MARKUP = re.compile(r"[\\`*\[\]<>|&#~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore between letters is none


def render_markdown(report: Report, drawings: bool = True) -> str:
    """Returns the whole document. drawings: whether figures link to their files; their tables are there in any case."""
    parts = [f"# {_escaped(report.title)}", *(_markdown(block, 2, drawings) for block in report.blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _escaped(text: object) -> str:
    return MARKUP.sub(r"\\\g<0>", visible(str(text)))


def _markdown(block: Block, level: int, drawings: bool) -> str:
    match block:
        case Paragraph(text) | Verdict(text):
            return _escaped(text)
        case Alert(text, label):
            return f"> **{_escaped(label.upper())}:** {_escaped(text)}"
        case Table():
            return "" if block.folded else markdown_table(block)
        case Figure():
            image = f"![{_escaped(block.alternative)}]({FIGURES}/{block.name}.svg)\n\n" if drawings else ""
            return f"{image}{_escaped(block.caption)}\n\n{markdown_table(block.data)}"
        case Passages(caption, passages):
            lines = [[one.label, "".join(span.text for span in one.spans)] for one in passages]
            return markdown_table(table(caption, ["part", "text"], lines))
        case Section():
            inner = [_markdown(one, level + 1, drawings) for one in block.blocks]
            return "\n\n".join([f"{'#' * min(level, 6)} {_escaped(block.title)}", *filter(None, inner)])


def markdown_table(table: Table) -> str:
    """Returns the caption in bold, and the rows."""
    head, *rows = ("| " + " | ".join(map(_escaped, line)) + " |" for line in (table.header, *table.rows))
    return "\n".join([f"**{_escaped(table.caption)}**", "", head, "|" + " --- |" * len(table.header), *rows])


def render_text(blocks: Sequence[Block]) -> str:
    """Returns the blocks for a terminal, an empty line between two; a figure is its table."""
    return "\n\n".join(filter(None, map(_text, blocks))) + "\n"


def _text(block: Block) -> str:
    match block:
        case Paragraph(text) | Verdict(text):
            return textwrap.fill(visible(text), WIDTH)
        case Alert(text, label):
            return textwrap.fill(f"{label.upper()}: {visible(text)}", WIDTH)
        case Table():
            return _text_table(block)
        case Figure():
            return f"{textwrap.fill(visible(block.caption), WIDTH)}\n\n{_text_table(block.data)}"
        case Passages(caption, passages):
            return "\n\n".join([visible(caption), *map(_text_passage, passages)])
        case Section():
            title = visible(block.title)
            return f"{title}\n{'-' * len(title)}\n\n{render_text(block.blocks).rstrip()}"


def _text_passage(passage: Passage) -> str:
    """The first differing token stands between >>> and <<<."""
    shown = ((visible(span.text, lines=True), span.kind) for span in passage.spans)
    whole = "".join(f">>>{text}<<<" if kind == "mark" else text for text, kind in shown)
    lines = [piece for line in whole.split("\n") for piece in (textwrap.wrap(line, WIDTH - 4) or [""])]
    return "\n".join([f"  {visible(passage.label)}", *(f"  | {line}" for line in lines)])


def _text_table(table: Table) -> str:
    cells = [[textwrap.wrap(visible(str(cell)), CELL) or [""] for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells)]
    lines = []
    for row in cells:
        for n in range(max(map(len, row))):
            parts = (cell[n] if n < len(cell) else "" for cell in row)
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths)).rstrip())
    depth = max(map(len, cells[0]))
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([visible(table.caption), *lines[:depth], rule, *lines[depth:]])
