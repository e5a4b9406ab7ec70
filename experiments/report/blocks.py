"""The blocks that a report consists of, before they become text, Markdown or HTML. Every text is plain: the renderers
escape it."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Link:
    """A text that leads to an anchor of the same page."""

    text: str
    anchor: str


Cell = str | Link


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Alert:
    """A failed gate, an unfinished run, or a caution under the label "Note". `label` leads the text."""

    text: str
    label: str = "Failed"


@dataclass(frozen=True)
class Verdict:
    """One line that says that everything passed, or the frozen interpretation."""

    text: str


@dataclass(frozen=True)
class Table:
    """`rows` under `header`; the first cell of each row names it. folded: shown on demand in HTML, not in Markdown."""

    caption: str
    header: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), (
            f"{self.caption}: a row has another number of cells than the header"
        )


@dataclass(frozen=True)
class Figure:
    """A drawing with its text alternative, and the numbers it shows as a table."""

    name: str  # of the drawing's file
    caption: str
    alternative: str
    data: Table
    draw: Callable[[], str | None]  # returns the inline <svg> element; None where matplotlib cannot be loaded
    wide: bool = False  # on the page over the whole width

    @cached_property
    def svg(self) -> str | None:
        """The drawing, made when it is first needed."""
        return self.draw()


@dataclass(frozen=True)
class Span:
    """A piece of decoded text."""

    text: str  # line breaks and spaces are kept
    kind: str = ""  # "mark": the first differing token; "special": a token that is not text, spelled out


@dataclass(frozen=True)
class Passage:
    """Text with a label, such as one block of a row or the suffix of some arms."""

    label: str
    spans: tuple[Span, ...]
    colour: str = "line"  # name in style.PALETTE


@dataclass(frozen=True)
class Passages:
    """Passages under a caption, one below another; columns: all but the first side by side."""

    caption: str
    passages: tuple[Passage, ...]
    columns: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with its blocks; `anchor` is an identifier within the page."""

    title: str
    anchor: str
    blocks: tuple["Block", ...]


Block = Paragraph | Alert | Verdict | Table | Figure | Passages | Section


@dataclass(frozen=True)
class RowEntry:
    """One ledger row in the page's row list."""

    run: str
    key: str  # the row's identity in its run
    anchor: str  # identifier within the page
    facts: tuple[str, ...]  # shown in the list, beside the key
    flags: frozenset[str]  # of "diverged", "answer", "gate": what the list can be filtered by
    order: dict[str, float]  # of "first", "drift", "margin": what the list can be sorted by
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    title: str
    blocks: tuple[Block, ...]
    rows: tuple[RowEntry, ...] = ()


def table(caption: str, header: Sequence[Cell], rows: Sequence[Sequence[Cell]], folded: bool = False) -> Table:
    """A Table from any sequences."""
    return Table(caption, tuple(header), tuple(tuple(row) for row in rows), folded)


def figures(blocks: Sequence[Block]) -> list[Figure]:
    """All figures in reading order."""
    found: list[Figure] = []
    for block in blocks:
        if isinstance(block, Section):
            found.extend(figures(block.blocks))
        elif isinstance(block, Figure):
            found.append(block)
    return found


def escaped(text: str) -> str:
    """`visible` text for HTML."""
    return html.escape(visible(text), quote=True)


def visible_lines(text: str) -> str:
    """`text` with its line breaks and spaces, every other character without a glyph spelled out."""
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def visible(text: str) -> str:
    """`text` with every character that has no glyph of its own (controls, bidirectional overrides, lone surrogates)
    spelled out, and line breaks as spaces: user data cannot hide or reorder what stands around it.
    """
    spaced = " ".join(text.split()) if not text.isprintable() else text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in spaced)
