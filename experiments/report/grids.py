"""The drawings that are grids: what a role may see, one row's blocks, and donor against recipient."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.document import Figure, table
from experiments.report.drawing import colour, figure
from minimodel.roles import ROLE_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONSTRUCTIONS = ("incremental", "prefill")
# (recipient, donor of the cache) -> the arm; the native constructions keep their own cache
TRANSPLANTS = {
    ("incremental", "incremental"): "incremental",
    ("incremental", "prefill"): "prefill_cache_into_incremental",
    ("prefill", "incremental"): "incremental_cache_into_prefill",
    ("prefill", "prefill"): "prefill",
}
BLOCK_COLOURS = ("muted", "first", "third", "fourth", "second", "fail")


def role_label(role: int) -> str:
    return ROLE_NAMES[role].replace("_", " ")


def visibility_figure(name: str, visibility: Sequence[Sequence[int]]) -> Figure:
    """The 6 x 6 role table: query rows, key columns."""
    names = [role_label(role) for role in range(len(visibility))]

    def draw(axes: "Axes") -> None:
        for query, row in enumerate(visibility):
            for key, seen in enumerate(row):
                box(axes, key, query, 1, 1, colour("first") if seen else colour("panel"), 0.8 if seen else 1.0)
                if seen:
                    axes.text(key + 0.5, query + 0.5, "✓", ha="center", va="center", color=colour("page"))
        axes.set_xticks([k + 0.5 for k in range(len(names))], names, rotation=30, ha="right")
        axes.set_yticks([k + 0.5 for k in range(len(names))], names)
        plain(axes, len(names), len(names))
        axes.set_xlabel("key: whom it sees")
        axes.set_ylabel("query: who looks")

    lines = [[names[q], *("yes" if seen else "no" for seen in row)] for q, row in enumerate(visibility)]
    told = "; ".join(
        f"{names[q]} sees {', '.join(names[k] for k, seen in enumerate(row) if seen)}"
        for q, row in enumerate(visibility)
    )
    return figure(
        name,
        3.9,
        draw,
        "Which role may attend to which, within causality and padding.",
        f"A grid of six query roles against six key roles. {told}.",
        table("Visibility", ["query", *names], lines),
    )


def mask_figure(name: str, row: str, blocks: Sequence[tuple[int, int]], visibility: Sequence[Sequence[int]]) -> Figure:
    """The attention mask of one row, to scale. blocks: (role, tokens) in order, delimiters included."""
    starts = [sum(length for _, length in blocks[:k]) for k in range(len(blocks))]
    total = sum(length for _, length in blocks)

    def draw(axes: "Axes") -> None:
        for (query, height), top in zip(blocks, starts):
            for (key, width), left in zip(blocks, starts):
                if left < top and visibility[query][key]:
                    box(axes, left, top, width, height, colour(BLOCK_COLOURS[key]), 0.35)
                elif left == top and visibility[query][key]:
                    corners = [(left, top), (left, top + height), (left + width, top + height)]
                    axes.fill(*zip(*corners), color=colour(BLOCK_COLOURS[key]), alpha=0.75, linewidth=0)
            box(axes, top, -0.06 * total, height, 0.045 * total, colour(BLOCK_COLOURS[query]), 0.9)
            axes.axhline(top, color=colour("line"), linewidth=0.7, zorder=0)
        axes.set_xlim(0, total)
        axes.set_ylim(total, -0.07 * total)
        middles = [start + length / 2 for start, (_, length) in zip(starts, blocks)]
        axes.set_yticks(middles, [role_label(role) for role, _ in blocks])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("key position, tokens")
        axes.spines[:].set_visible(False)

    lines = [[role_label(role), str(start), str(length)] for (role, length), start in zip(blocks, starts)]
    told = ", ".join(f"{role_label(role)} {length}" for role, length in blocks)
    return figure(
        name,
        4.3,
        draw,
        f"Row {row}, {total} tokens to scale: the strip above is the token sequence, below it every query (down) and "
        "the keys it may attend to (across). The boundary lies one token into merge.",
        f"The blocks of one row in tokens: {told}; shaded where a query may attend.",
        table("The blocks of this row", ["block", "first position", "tokens"], lines),
    )


def transplant_figure(name: str, label: str, rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Recipient against cache donor: how many divergent rows follow which construction's suffix."""
    divergent = [
        row["arms"] for row in rows if row.get("arms") and _suffix(row, "incremental") != _suffix(row, "prefill")
    ]
    if not divergent:
        return None
    cells = {cell: _followers([_follows(arms, arm) for arms in divergent]) for cell, arm in TRANSPLANTS.items()}

    def draw(axes: "Axes") -> None:
        for (recipient, donor), (own, other, third) in cells.items():
            x, y = CONSTRUCTIONS.index(donor), CONSTRUCTIONS.index(recipient)
            share = (own if donor == "incremental" else other) / len(divergent)
            box(axes, x, y, 1, 1, colour("first" if donor == "incremental" else "second"), 0.08 + 0.4 * share)
            text = f"{own} incremental\n{other} prefill\n{third} neither"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", linespacing=1.5)
        axes.set_xticks([0.5, 1.5], CONSTRUCTIONS)
        axes.set_yticks([0.5, 1.5], CONSTRUCTIONS, rotation=90, va="center")
        plain(axes, 2, 2)
        axes.set_xlabel("donor of the whole cache")
        axes.set_ylabel("recipient of the cache")

    lines = [
        [f"{recipient} recipient, {donor} cache", *map(str, cells[recipient, donor])] for recipient, donor in cells
    ]
    told = "; ".join(f"{line[0]}: {line[1]} follow incremental, {line[2]} prefill, {line[3]} neither" for line in lines)
    return figure(
        name,
        3.1,
        draw,
        f"{label}: whose suffix each of the {len(divergent)} divergent rows follows. Where the cache "
        "carries the trajectory, every column holds one kind.",
        f"A grid of two recipients against two cache donors. {told}.",
        table("Rows by the suffix they follow", ["state", "incremental", "prefill", "neither"], lines),
    )


def _follows(arms: dict[str, Any], arm: str) -> str:
    suffix = arms[arm]["suffix_sha256"]
    return next((name for name in CONSTRUCTIONS if arms[name]["suffix_sha256"] == suffix), "neither")


def _followers(names: list[str]) -> tuple[int, int, int]:
    counts = Counter(names)
    return counts["incremental"], counts["prefill"], counts["neither"]


def _suffix(row: dict[str, Any], arm: str) -> str:
    return str(row["arms"][arm]["suffix_sha256"])


def box(axes: "Axes", x: float, y: float, width: float, height: float, fill: str, alpha: float) -> None:
    """A filled cell."""
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=fill, alpha=alpha, edgecolor=colour("page"), linewidth=0.6)
    )


def plain(axes: "Axes", width: int, height: int) -> None:
    """Axes of a grid of width x height cells, the first row on top."""
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
