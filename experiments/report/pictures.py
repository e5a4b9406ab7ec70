"""Pictures of the matched design (the paper's Figure 1) and of one row's attention mask."""

from collections.abc import Sequence

from experiments.report.blocks import Figure, table
from experiments.report.style import ROLE_COLOURS
from experiments.report.svg import Drawing, text_width
from experiments.report.values import words
from minimodel.roles import ROLE_NAMES

WIDTH, HEIGHT = 760.0, 396.0
# construction: (what feeds the tokens, what its replica is, colour)
CONSTRUCTIONS = {
    "live": ("kept from ordinary generation", "a bit-exact copy", "third"),
    "incremental": ("the fixed tokens, one per call", "a bit-exact copy", "first"),
    "prefill": ("the fixed tokens in one call", "a second, independent call", "second"),
}
ROW = 62.0


def design_figure() -> Figure:
    """Prefix, constructions with replicas, transplants, one suffix decoder, comparisons."""
    drawing = Drawing(HEIGHT, WIDTH)
    prefix = ("one prefix z", "integer tokens, roles,", "positions, visibility", "through <|merge|>")
    _box(drawing, 10, 152, 138, 104, "ink", prefix)
    for k, (name, (fed, _, colour)) in enumerate(CONSTRUCTIONS.items()):
        top = 66 + (ROW + 44) * k
        drawing.arrow(148, 204, 186, top + ROW / 2, colour)
        _box(drawing, 190, top, 196, ROW, colour, (name, fed, "K/V cache and logits"))
        drawing.rect(394, top + 10, 30, ROW - 20, colour, 0.25)
        drawing.text(409, top + ROW / 2 + 4, "=", "middle", 15)
        drawing.arrow(430, top + ROW / 2, 484, 204, colour)
    drawing.text(409, 52, "replica", "middle", 11, "muted")
    for x, (start, end) in ((252, (234, 278)), (324, (278, 234))):
        drawing.arrow(x, start, x, end, "fail", "4 3")
    drawing.text(288, 260, "whole", "middle", 11, "fail")
    _box(drawing, 488, 168, 118, 72, "ink", ("one greedy", "suffix decoder", "same rules for all"))
    drawing.arrow(606, 204, 636, 204, "ink")
    compared = ("compared", "cache, logits", "suffix tokens", "merge, answer", "correctness")
    _box(drawing, 640, 142, 112, 124, "ink", compared)
    title = "Matched design: everything but the construction of the cache is held fixed"
    drawing.text(10, 26, title, size=14, weight="600")
    legend = "=: a replica must be equal in every bit (gate)", "dashed: the whole cache is replaced by the other's"
    for x, text in zip((10, 330), legend):
        drawing.text(x, HEIGHT - 12, text, size=11, fill="muted")
    lines = [[name, fed, replica] for name, (fed, replica, _) in CONSTRUCTIONS.items()]
    return Figure(
        "design",
        "The matched design. A matrix compares live with prefill, fixed prefixes compare incremental with prefill at "
        "each precision, the bridge compares live with incremental, and transplants exchange whole caches.",
        "One fixed prefix leads to three constructions of the cache, live, incremental and prefill, each with a "
        "replica that must be bit-equal. All continue under one greedy suffix decoder and are compared in cache, "
        "logits, suffix, merge, answer and correctness. Between incremental and prefill, whole caches are exchanged.",
        table("The three constructions", ["construction", "fed with", "replica"], lines),
        drawing.svg,
        wide=True,
    )


def _box(
    drawing: Drawing, x: float, y: float, width: float, height: float, stroke: str, lines: tuple[str, ...]
) -> None:
    """A framed box; its first line is a title."""
    drawing.frame(x, y, width, height, stroke)
    top = y + height / 2 - 8 * (len(lines) - 1) + 4
    for k, line in enumerate(lines):
        size, fill, weight = (13.0, stroke, "600") if k == 0 else (11.0, "ink", "")
        drawing.text(x + width / 2, top + 17 * k - 2, line, "middle", size, fill, weight=weight)


def mask_figure(
    name: str, blocks: Sequence[tuple[int, int]], visibility: Sequence[Sequence[int]], boundary: int | None = None
) -> Figure:
    """The attention mask of one row, to scale.

    blocks: (role, tokens) in order, delimiters included; boundary: tokens of the prefix, marked by a line.
    """
    starts = [sum(length for _, length in blocks[:k]) for k in range(len(blocks))]
    total = sum(length for _, length in blocks)
    names = [words(ROLE_NAMES[role]) for role, _ in blocks]
    left_edge = 14 + max(map(text_width, names))
    drawing = Drawing(334, 440)

    def x(position: float) -> float:
        return left_edge + position / total * (428 - left_edge)

    def y(position: float) -> float:
        return 24 + position / total * 256

    for (query, height), top in zip(blocks, starts):
        for (key, width), left in zip(blocks, starts):
            if left <= top and visibility[query][key]:
                corners = [(left, top), (left, top + height), (left + width, top + height)]
                square = [(left, top), (left, top + height), (left + width, top + height), (left + width, top)]
                points = corners if left == top else square
                drawing.polygon([(x(a), y(b)) for a, b in points], ROLE_COLOURS[key], 0.75 if left == top else 0.4)
        drawing.rect(x(top), 10, x(top + height) - x(top), 9, ROLE_COLOURS[query])
        drawing.line(x(0), y(top), x(total), y(top), "line", 0.7)
        drawing.text(x(0) - 7, y(top + height / 2) + 4, words(ROLE_NAMES[query]), "end", 11)
    if boundary is not None:
        drawing.line(x(boundary), 10, x(boundary), 280, "ink", 1.2, "4 3")
        drawing.text(x(boundary) - 4, 36, "boundary", "end", 11)
    for position, anchor in ((0, "start"), (total // 2, "middle"), (total, "end")):
        drawing.text(x(position), 297, str(position), anchor, 11)
    drawing.text(x(total / 2), 322, "key position, tokens", "middle")
    lines = [[label, str(start), str(length)] for label, (_, length), start in zip(names, blocks, starts)]
    told = ", ".join(f"{label} {length}" for label, (_, length) in zip(names, blocks))
    return Figure(
        name,
        f"{total} tokens to scale: the strip on top is the token sequence; below it every query (down) and the keys it "
        "may attend to (across). The boundary lies one token into merge.",
        f"The blocks of one row in tokens: {told}; shaded where a query may attend.",
        table("The blocks of this row", ["block", "first position", "tokens"], lines),
        drawing.svg,
    )
