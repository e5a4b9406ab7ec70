"""The drawings that are grids: role visibility, one row's attention mask, and donor against recipient."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.report.blocks import Figure, table
from experiments.report.style import ROLE_COLOURS
from experiments.report.svg import Plot, text_width
from experiments.report.values import words
from minimodel.roles import ROLE_NAMES

CONSTRUCTIONS = ("incremental", "prefill")
# (recipient, donor of the cache) -> the arm; the native constructions keep their own cache
TRANSPLANTS = {
    ("incremental", "incremental"): "incremental",
    ("incremental", "prefill"): "prefill_cache_into_incremental",
    ("prefill", "incremental"): "incremental_cache_into_prefill",
    ("prefill", "prefill"): "prefill",
}


def visibility_figure(name: str, visibility: Sequence[Sequence[int]]) -> Figure:
    """The 6 x 6 role table: query rows, key columns."""
    names = [words(ROLE_NAMES[role]) for role in range(len(visibility))]
    plot = Plot(28.0 * len(names), 30 + max(map(text_width, names)))
    x, y = plot.x_scale(0, len(names)), plot.y0
    for query, row in enumerate(visibility):
        for key, seen in enumerate(row):
            plot.rect(x(key) + 1, y + 28 * query + 1, x(1) - x(0) - 2, 26, "first" if seen else "panel")
            if seen:
                plot.text(x(key + 0.5), y + 28 * query + 19, "✓", "middle", fill="page")
    plot.x_axis([(x(k + 0.5), label) for k, label in enumerate(names)], "key role")
    plot.y_axis([(y + 28 * (k + 0.5), label) for k, label in enumerate(names)], "query role")
    lines = [[names[q], *("yes" if seen else "no" for seen in row)] for q, row in enumerate(visibility)]
    told = "; ".join(
        f"{names[q]} sees {', '.join(names[k] for k, seen in enumerate(row) if seen)}"
        for q, row in enumerate(visibility)
    )
    return Figure(
        name,
        "Which role may attend to which, within causality and padding.",
        f"A grid of six query roles against six key roles. {told}.",
        table("Visibility", ["query", *names], lines),
        plot.svg(),
    )


def mask_figure(
    name: str, blocks: Sequence[tuple[int, int]], visibility: Sequence[Sequence[int]], boundary: int | None = None
) -> Figure:
    """The attention mask of one row, to scale.

    blocks: (role, tokens) in order, delimiters included; boundary: tokens of the prefix, marked by a line.
    """
    starts = [sum(length for _, length in blocks[:k]) for k in range(len(blocks))]
    total = sum(length for _, length in blocks)
    names = [words(ROLE_NAMES[role]) for role, _ in blocks]
    plot = Plot(270, 14 + max(map(text_width, names)))
    x = plot.x_scale(0, total)

    def y(position: float) -> float:
        return plot.y0 + 14 + position / total * (plot.y1 - plot.y0 - 14)

    for (query, height), top in zip(blocks, starts):
        for (key, width), left in zip(blocks, starts):
            if left <= top and visibility[query][key]:
                corners = [(left, top), (left, top + height), (left + width, top + height)]
                square = [(left, top), (left, top + height), (left + width, top + height), (left + width, top)]
                points = corners if left == top else square
                plot.polygon([(x(a), y(b)) for a, b in points], ROLE_COLOURS[key], 0.75 if left == top else 0.4)
        plot.rect(x(top), plot.y0, x(top + height) - x(top), 9, ROLE_COLOURS[query])
        plot.line(plot.x0, y(top), plot.x1, y(top), "line", 0.7)
    if boundary is not None:
        plot.line(x(boundary), plot.y0, x(boundary), plot.y1, "ink", 1.2, "4 3")
        plot.text(x(boundary) - 4, plot.y0 + 26, "boundary", "end", 11)
    plot.x_axis([(x(v), f"{v:g}") for v in (0, total // 2, total)], "key position, tokens")
    plot.y_axis([(y(start + length / 2), label) for start, (_, length), label in zip(starts, blocks, names)])
    lines = [[label, str(start), str(length)] for label, (_, length), start in zip(names, blocks, starts)]
    told = ", ".join(f"{label} {length}" for label, (_, length) in zip(names, blocks))
    return Figure(
        name,
        f"{total} tokens to scale: the strip on top is the token sequence; below it every query (down) and the keys it "
        "may attend to (across). The boundary lies one token into merge.",
        f"The blocks of one row in tokens: {told}; shaded where a query may attend.",
        table("The blocks of this row", ["block", "first position", "tokens"], lines),
        plot.svg(),
    )


def transplant_figure(name: str, label: str, rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Recipient against cache donor: how many divergent rows follow which construction's suffix."""
    divergent = [
        row["arms"] for row in rows if row.get("arms") and _suffix(row, "incremental") != _suffix(row, "prefill")
    ]
    if not divergent:
        return None
    cells = {cell: Counter(follows(arms, arm) for arms in divergent) for cell, arm in TRANSPLANTS.items()}
    plot = Plot(180, 120, bottom=44)
    x = plot.x_scale(0, 2)
    for (recipient, donor), counts in cells.items():
        left, top = x(CONSTRUCTIONS.index(donor)), plot.y0 + 90 * CONSTRUCTIONS.index(recipient)
        colour = "first" if donor == "incremental" else "second"
        plot.rect(left + 1, top + 1, x(1) - x(0) - 2, 88, colour, 0.08 + 0.4 * counts[donor] / len(divergent))
        for line, side in enumerate((*CONSTRUCTIONS, "neither")):
            plot.text((left + x(1) - x(0) + left) / 2, top + 28 + 20 * line, f"{counts[side]} {side}", "middle")
    plot.x_axis([(x(k + 0.5), side) for k, side in enumerate(CONSTRUCTIONS)], "donor of the whole cache")
    plot.y_axis([(plot.y0 + 45 + 90 * k, side) for k, side in enumerate(CONSTRUCTIONS)], "recipient of the cache")
    sides = (*CONSTRUCTIONS, "neither")
    lines = [
        [f"{recipient} recipient, {donor} cache", *(str(cells[recipient, donor][side]) for side in sides)]
        for recipient, donor in cells
    ]
    told = "; ".join(f"{line[0]}: {line[1]} follow incremental, {line[2]} prefill, {line[3]} neither" for line in lines)
    return Figure(
        name,
        f"{label}: whose suffix each of the {len(divergent)} divergent rows follows. Where the cache "
        "carries the trajectory, every column holds one kind.",
        f"A grid of two recipients against two cache donors. {told}.",
        table("Rows by the suffix they follow", ["state", *sides], lines),
        plot.svg(),
    )


def follows(arms: dict[str, Any], arm: str) -> str:
    """The construction whose suffix the arm repeats, or "neither"."""
    suffix = arms[arm]["suffix_sha256"]
    return next((name for name in CONSTRUCTIONS if arms[name]["suffix_sha256"] == suffix), "neither")


def _suffix(row: dict[str, Any], arm: str) -> str:
    return str(row["arms"][arm]["suffix_sha256"])
