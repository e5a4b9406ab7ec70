"""Blocks as Markdown, with drawings as files beside it, and as text for a terminal."""

import itertools
import re
import textwrap
from collections.abc import Sequence

from experiments.report import blocks as kinds
from experiments.report.blocks import Block, Report, Table, visible

FIGURES = "figures"  # folder of the drawings, beside report.md
WIDTH, CELL = 100, 60  # of a terminal's line, and of the longest line in a cell of a table
MARKUP = re.compile(r"[\\`*\[\]<>|&#~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore between letters is none


def render_markdown(report: Report, drawings: bool = True) -> str:
    """Returns the whole document. drawings: whether figures link to their files; their tables are there in any case."""
    return _markdown(kinds.Section(report.title, "", report.blocks), 1, drawings) + "\n"


def _escaped(text: object) -> str:
    return MARKUP.sub(r"\\\g<0>", visible(str(text)))


def _markdown(block: Block, level: int, drawings: bool) -> str:
    match block:
        case kinds.Paragraph(text) | kinds.Verdict(text):
            return _escaped(text)
        case kinds.Alert(text, label):
            return f"> **{_escaped(label.upper())}:** {_escaped(text)}"
        case kinds.Table():
            return "" if block.folded else markdown_table(block)
        case kinds.Figure(name, caption, data):
            image = f"![{_escaped(block.alternative)}]({FIGURES}/{name}.svg)\n\n" if drawings and block.svg else ""
            return f"{image}{_escaped(caption)}\n\n{markdown_table(data)}"
        case kinds.Passages(caption, passages):
            lines = [[one.label, "".join(span.text for span in one.spans)] for one in passages]
            return markdown_table(Table(caption, ["part", "text"], lines))
        case kinds.Section(title, _, inner):
            parts = [
                f"{'#' * min(level, 6)} {_escaped(title)}",
                *(_markdown(one, level + 1, drawings) for one in inner),
            ]
            return "\n\n".join(filter(None, parts))


def markdown_table(table: Table) -> str:
    """Returns the caption in bold, and the rows."""
    head, *rows = ("| " + " | ".join(map(_escaped, line)) + " |" for line in (table.header, *table.rows))
    return "\n".join([f"**{_escaped(table.caption)}**", "", head, "|" + " --- |" * len(table.header), *rows])


def render_text(blocks: Sequence[Block]) -> str:
    """Returns the blocks for a terminal, an empty line between two; a figure is its table."""
    return "\n\n".join(filter(None, map(_text, blocks))) + "\n"


def _text(block: Block) -> str:
    match block:
        case kinds.Paragraph(text) | kinds.Verdict(text):
            return textwrap.fill(visible(text), WIDTH)
        case kinds.Alert(text, label):
            return textwrap.fill(f"{label.upper()}: {visible(text)}", WIDTH)
        case kinds.Table():
            return _text_table(block)
        case kinds.Figure(_, caption, data):
            return f"{textwrap.fill(visible(caption), WIDTH)}\n\n{_text_table(data)}"
        case kinds.Passages(caption, passages):
            return "\n\n".join([visible(caption), *map(_text_passage, passages)])
        case kinds.Section(title, _, inner):
            return f"{visible(title)}\n{'-' * len(visible(title))}\n\n{render_text(inner).rstrip()}"


def _text_passage(passage: kinds.Passage) -> str:
    """Returns a text under its label; the first differing token stands between >>> and <<<."""
    shown = ((visible(span.text, lines=True), span.kind) for span in passage.spans)
    whole = "".join(f">>>{text}<<<" if kind == "mark" else text for text, kind in shown)
    lines = [piece for line in whole.split("\n") for piece in (textwrap.wrap(line, WIDTH - 4) or [""])]
    return "\n".join([f"  {visible(passage.label)}", *(f"  | {line}" for line in lines)])


def _text_table(table: Table) -> str:
    cells = [[textwrap.wrap(visible(str(cell)), CELL) or [""] for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells)]
    lines = [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths)).rstrip()
        for row in cells
        for parts in itertools.zip_longest(*row, fillvalue="")
    ]
    depth = max(map(len, cells[0]))
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([visible(table.caption), *lines[:depth], rule, *lines[depth:]])
