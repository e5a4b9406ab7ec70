"""The blocks of a report, before they become text, Markdown or HTML. Every text is plain: the renderers escape it."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from experiments.run.exits import one_line, readable


class Link(NamedTuple):
    """A text that leads to an anchor of the same page."""

    text: str
    anchor: str

    def __str__(self) -> str:
        return self.text


Cell = str | Link


class Paragraph(NamedTuple):
    text: str


class Alert(NamedTuple):
    """A failed gate, an unfinished run, or a caution under the label "Note". `label` leads the text."""

    text: str
    label: str = "Failed"


class Verdict(NamedTuple):
    """One line that says that everything passed, or the frozen interpretation."""

    text: str


@dataclass(frozen=True)
class Table:
    """`rows` under `header`; the first cell of each row names it. folded: shown on demand in HTML, not in Markdown."""

    caption: str
    header: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), f"{self.caption}: a row's cells are no header's"


@dataclass(frozen=True)
class Figure:
    """A drawing beside the table of the numbers it shows."""

    name: str  # of the drawing's file
    caption: str
    data: Table
    draw: Callable[[], str]  # returns the inline <svg> element; "" for a chart where matplotlib is missing
    wide: bool = False  # over the whole width of the page

    @cached_property
    def svg(self) -> str:
        """The drawing, made when it is first used."""
        return self.draw()

    @property
    def alternative(self) -> str:
        """The text alternative: the beginning of the table."""
        lines = "; ".join(", ".join(filter(None, map(str, row))) for row in self.data.rows)
        text = f"{self.data.caption} ({', '.join(filter(None, map(str, self.data.header)))}): {lines}"
        return textwrap.shorten(text, 600, placeholder=" ...")


class Span(NamedTuple):
    """A piece of decoded text."""

    text: str  # line breaks and spaces are kept
    kind: str = ""  # "mark": the first differing token; "special": a token that is not text, spelled out


class Passage(NamedTuple):
    """Text with a label, such as one block of a row or the suffix of some arms."""

    label: str
    spans: Sequence[Span]
    colour: str = "line"  # name in charts.PALETTE


class Passages(NamedTuple):
    """Passages under a caption, one below another; columns: all but the first side by side."""

    caption: str
    passages: Sequence[Passage]
    columns: bool = False


class Section(NamedTuple):
    """A heading with its blocks; `anchor` is an identifier within the page."""

    title: str
    anchor: str
    blocks: Sequence["Block"]


Block = Paragraph | Alert | Verdict | Table | Figure | Passages | Section


class RowEntry(NamedTuple):
    """One ledger row in the page's row list."""

    run: str
    key: str  # the row's identity in its run
    anchor: str  # identifier within the page
    facts: Sequence[str]  # shown in the list, beside the key
    flags: frozenset[str]  # of "diverged", "answer", "gate": what the list can be filtered by
    order: dict[str, float]  # of "first", "drift", "margin": what the list can be sorted by
    blocks: Sequence[Block]


class Report(NamedTuple):
    title: str
    blocks: Sequence[Block]
    rows: Sequence[RowEntry] = ()


def column_table(
    caption: str, corner: Cell, columns: Sequence[tuple[Cell, Mapping[str, str]]], absent: str = ""
) -> Table:
    """Returns a table of (heading, {label: cell}) columns: one row per label, `absent` where a column lacks it."""
    labels = dict.fromkeys(label for _, column in columns for label in column)
    lines = [[label, *(column.get(label, absent) for _, column in columns)] for label in labels]
    return Table(caption, [corner, *(heading for heading, _ in columns)], lines)


def visible(text: str, lines: bool = False) -> str:
    """Returns `text` with every character without a glyph (controls, bidirectional overrides, lone surrogates) spelled
    out, so that user data cannot hide or reorder what stands around it. lines: keeps line breaks and spaces."""
    if text.isprintable():
        return text
    return "\n".join(map(readable, text.split("\n"))) if lines else one_line(text)
