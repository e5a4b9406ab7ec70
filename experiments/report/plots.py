"""The charts of paired comparisons and transplants, each beside the table of the numbers it shows.

No statistic is computed here beyond medians of the ledger's values. Series differ by marker and line as well as by
colour.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.blocks import Figure, Table, table
from experiments.report.charts import (
    LIGHT,
    bar,
    cell_grid,
    chart,
    legend,
    line_look,
    log_scale,
    look,
    name_rows,
    short,
)
from experiments.report.runs import Pair
from experiments.report.values import change, describe, number, rate, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDPOINTS = ("suffix_disagreement", "merge_disagreement", "answer_disagreement", "correctness_disagreement")
CONSTRUCTIONS = ("incremental", "prefill")
# (recipient, donor of the cache) -> the arm; the native constructions keep their own cache
TRANSPLANTS = {
    ("incremental", "incremental"): "incremental",
    ("incremental", "prefill"): "prefill_cache_into_incremental",
    ("prefill", "incremental"): "incremental_cache_into_prefill",
    ("prefill", "prefill"): "prefill",
}


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Disagreement rates with their Wilson 95 % intervals, one series per pair."""
    endpoints = [key for key in ENDPOINTS if any(key in pair.summary for pair in pairs)]
    step = min(0.25, 0.7 / len(pairs))

    def draw(axes: "Axes") -> None:
        for index, pair in enumerate(pairs):
            label = short(pair.label)
            for place, key in enumerate(endpoints):
                block = pair.summary.get(key)
                if block and block["rate"] is not None:
                    y = place + (index - (len(pairs) - 1) / 2) * step
                    bar(axes, 100 * block["rate"], [100 * bound for bound in block["wilson_95"]], y, index, label)
                    label = ""
        name_rows(axes, [words(key).removesuffix(" disagreement") for key in endpoints])
        axes.set_xlim(-2, 102)
        axes.set_xlabel("rows that disagree, %")
        legend(axes)

    lines = [[words(key), *(_rate(pair.summary.get(key)) for pair in pairs)] for key in endpoints]
    data = table("Disagreement of the two arms", ["endpoint", *(pair.label for pair in pairs)], lines)
    told = "; ".join(f"{line[0]}: " + ", ".join(line[1:]) for line in lines)
    return chart(
        name,
        0.8 + 0.25 * len(pairs) + len(endpoints) * (0.25 + 0.17 * len(pairs)),
        draw,
        "Share of rows on which the two constructions disagree, with Wilson 95 % intervals.",
        f"Dots with interval bars, one series per run and precision. {told}.",
        data,
    )


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """The paired accuracy difference with its bootstrap interval, one line per pair; no bar where there is none."""
    blocks = [pair.summary["accuracy"] for pair in pairs]

    def draw(axes: "Axes") -> None:
        axes.axvline(0, color=LIGHT["muted"], linewidth=1)
        for index, block in enumerate(blocks):
            if block["difference_points"] is not None:
                bounds = None if block.get("bootstrap_note") else block["bootstrap_95"]
                bar(axes, block["difference_points"], bounds, index, index)
        name_rows(axes, [short(pair.label, 28) for pair in pairs])
        reach = 1.1 * max([5.0, *(abs(bound) for block in blocks for bound in block["bootstrap_95"] or [])])
        axes.set_xlim(-reach, reach)
        axes.set_xlabel("accuracy, second arm minus first, points")

    lines = []
    for pair, block in zip(pairs, blocks):
        counts = [f"{arm} {block[arm]['correct']}/{block[arm]['n']}" for arm in pair.arms]
        lines.append([pair.label, *counts, change(block)])
    data = table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], lines)
    return chart(
        name,
        0.7 + 0.35 * len(pairs),
        draw,
        "Paired accuracy difference with its bootstrap 95 % interval. A dot without a bar has no interval: every row "
        "has the same difference. Zero with few discordant rows does not establish that the constructions are equal.",
        "One dot with an interval bar per run. " + "; ".join(f"{a}: {b}, {c}, {d}" for a, b, c, d in lines) + ".",
        data,
    )


def divergence_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Histogram of the first diverging suffix token; None where nothing diverges."""
    found = [(pair, [c["suffix"]["first_divergence"] for c in pair.comparisons]) for pair in pairs]
    shown = [(pair, [i for i in indices if i is not None]) for pair, indices in found]
    shown = [(pair, indices) for pair, indices in shown if indices]
    if not shown:
        return None
    edges = _edges(max(max(indices) for _, indices in shown))
    bins = list(itertools.pairwise(edges))
    counts = [[sum(a <= i < b for i in indices) for a, b in bins] for _, indices in shown]

    def draw(axes: "Axes") -> None:
        colours = [look(index)["color"] for index in range(len(shown))]
        labels = [short(pair.label) for pair, _ in shown]
        axes.hist([indices for _, indices in shown], bins=edges, color=colours, label=labels, rwidth=0.85)
        axes.locator_params(integer=True)
        axes.set(xlabel="first differing token after the boundary", ylabel="rows")
        legend(axes)

    lines = [[f"{a} to {b - 1}", *(str(column[k]) for column in counts)] for k, (a, b) in enumerate(bins)]
    spread = "; ".join(f"{p.label}: {describe(p.summary['first_divergence'])}" for p, _ in shown)
    quiet = [pair.label for pair, indices in found if all(i is None for i in indices)]
    none = f" No row diverges in {', '.join(quiet)}." if quiet else ""
    return chart(
        name,
        2.7 + 0.25 * len(shown),
        draw,
        f"Where the suffixes of the two constructions first differ.{none}",
        f"Histogram of first divergences. {spread}.{none}",
        table("Rows by first differing token", ["token", *(pair.label for pair, _ in shown)], lines),
    )


def drift_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Median relative L2 of K and of V by layer; None where every layer is bit-exact."""
    curves: dict[str, list[float]] = {}
    for pair in pairs:
        for tensor in ("key", "value"):
            layers = [[layer[tensor]["relative_l2"] for layer in c["cache"]["layers"]] for c in pair.comparisons]
            curves[f"{pair.label}, {tensor[0].upper()}"] = _medians(layers)
    if not any(value for curve in curves.values() for value in curve):
        return None
    depth = max(map(len, curves.values()))
    lines = [[str(k), *(number(c[k]) if k < len(c) else "" for c in curves.values())] for k in range(depth)]
    return log_curves(
        name,
        list(range(depth)),
        curves,
        ("layer", "relative L2, median"),
        "Drift of the boundary cache by layer, keys (K) and values (V), median over rows; exact means equal bits.",
        table("Median relative L2 by layer", ["layer", *curves], lines),
    )


def log_curves(
    name: str,
    places: Sequence[Any],
    curves: dict[str, Sequence[float | None]] | dict[str, list[float]],
    axis_names: tuple[str, str],
    caption: str,
    data: Table,
) -> Figure:
    """Curves over places, numbers or words, on a logarithmic axis on which "exact" stands for zero."""

    def draw(axes: "Axes") -> None:
        for index, (label, curve) in enumerate(curves.items()):
            heights = [math.nan if value is None else value for value in curve]
            axes.plot(places[: len(curve)], heights, label=short(label), markersize=4.5, **line_look(index))
        log_scale(axes, [value for curve in curves.values() for value in curve if value is not None], "exact")
        if isinstance(places[0], str):
            axes.tick_params(axis="x", rotation=30)
        else:
            axes.locator_params(axis="x", integer=True)
        axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
        legend(axes)

    ends = "; ".join(f"{label}: {number(c[0])} to {number(c[-1])}" for label, c in curves.items())
    return chart(name, 2.9 + 0.25 * len(curves), draw, caption, f"Lines, first to last {axis_names[0]}. {ends}.", data)


def transplant_figure(name: str, label: str, rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Recipient against cache donor: how many divergent rows follow which construction's suffix."""
    arms_of = [row["arms"] for row in rows if row.get("arms")]
    divergent = [arms for arms in arms_of if follows(arms, "prefill") != follows(arms, "incremental")]
    if not divergent:
        return None
    counts = {cell: Counter(follows(arms, arm) for arms in divergent) for cell, arm in TRANSPLANTS.items()}
    sides = (*CONSTRUCTIONS, "neither")

    def draw(axes: "Axes") -> None:
        cells = [
            [
                (
                    "\n".join(f"{counts[recipient, donor][side]} {side}" for side in sides),
                    0.08 + 0.4 * counts[recipient, donor][donor] / len(divergent),
                    "first" if donor == "incremental" else "second",
                )
                for donor in CONSTRUCTIONS
            ]
            for recipient in CONSTRUCTIONS
        ]
        cell_grid(axes, CONSTRUCTIONS, CONSTRUCTIONS, cells)
        axes.set(xlabel="donor of the whole cache", ylabel="recipient of the cache")

    lines = [
        [f"{recipient} recipient, {donor} cache", *(str(found[side]) for side in sides)]
        for (recipient, donor), found in counts.items()
    ]
    told = "; ".join(f"{line[0]}: {line[1]} follow incremental, {line[2]} prefill, {line[3]} neither" for line in lines)
    return chart(
        name,
        3.0,
        draw,
        f"{label}: whose suffix each of the {len(divergent)} divergent rows follows. Where the cache "
        "carries the trajectory, every column holds one kind.",
        f"A grid of two recipients against two cache donors. {told}.",
        table("Rows by the suffix they follow", ["state", *sides], lines),
    )


def follows(arms: dict[str, Any], arm: str) -> str:
    """The constructions whose suffix the arm repeats, or "neither"."""
    suffix = arms[arm]["suffix_sha256"]
    return " and ".join(name for name in CONSTRUCTIONS if arms[name]["suffix_sha256"] == suffix) or "neither"


def _medians(rows: Sequence[Sequence[float | None]]) -> list[float]:
    depth = max((len(row) for row in rows), default=0)
    columns = [[v for row in rows if k < len(row) and (v := row[k]) is not None] for k in range(depth)]
    return [statistics.median(column) if column else 0.0 for column in columns]


def _edges(largest: int) -> list[int]:
    """Whole bin edges from 0 beyond `largest`: at most 24 bins of a round width."""
    width = next(w for k in range(9) for w in (10**k, 2 * 10**k, 5 * 10**k) if largest < 24 * w)
    return list(range(0, largest + width + 1, width))


def _rate(block: dict[str, Any] | None) -> str:
    return rate(block) if block else "not scored"
