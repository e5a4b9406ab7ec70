"""The drawings of paired comparisons: rates with Wilson bars, accuracy, first divergences, drift by layer.

Each takes the numbers its table shows, draws them where matplotlib is installed, and never computes a statistic of its
own beyond medians of what the ledger holds. Series differ by marker and line as well as by colour.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness.markdown import number, rate
from experiments.report.document import Figure, table
from experiments.report.drawing import (
    bar,
    colour,
    decades,
    figure,
    legend,
    line_look,
    look,
    name_rows,
    whole_numbers,
)
from experiments.report.runs import Pair
from experiments.report.style import SERIES
from experiments.report.values import change, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDPOINTS = ("suffix_disagreement", "merge_disagreement", "answer_disagreement", "correctness_disagreement")


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Disagreement rates with their Wilson 95 % intervals, one series a pair."""
    endpoints = [key for key in ENDPOINTS if any(key in pair.summary for pair in pairs)]

    def draw(axes: "Axes") -> None:
        for index, pair in enumerate(pairs):
            for place, key in enumerate(endpoints):
                block = pair.summary.get(key)
                if block and block["rate"] is not None:
                    bar(
                        axes,
                        block["rate"] * 100,
                        [b * 100 for b in block["wilson_95"]],
                        _place(place, index, pairs),
                        index,
                    )
        name_rows(axes, [words(key).removesuffix(" disagreement") for key in endpoints])
        axes.set_xlim(-2, 102)
        axes.set_xlabel("rows that disagree, %")
        legend(axes, [pair.label for pair in pairs], [{"linewidth": 2.2, **look(i)} for i in range(len(pairs))])

    lines = [[words(key), *(_rate(pair.summary.get(key)) for pair in pairs)] for key in endpoints]
    data = table("Disagreement of the two arms", ["endpoint", *(pair.label for pair in pairs)], lines)
    told = "; ".join(f"{line[0]}: " + ", ".join(line[1:]) for line in lines)
    return figure(
        name,
        1.2 + len(endpoints) * (0.3 + 0.17 * len(pairs)),
        draw,
        "Share of rows on which the two constructions disagree, with Wilson 95 % intervals.",
        f"Dots with interval bars, one series a run and precision. {told}.",
        data,
    )


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """The paired accuracy difference with its bootstrap interval, one line a pair."""

    def draw(axes: "Axes") -> None:
        axes.axvline(0, color=colour("muted"), linewidth=1)
        for index, pair in enumerate(pairs):
            block = pair.summary["accuracy"]
            if block["difference_points"] is not None:
                bar(axes, block["difference_points"], block["bootstrap_95"], index, index)
        name_rows(axes, [pair.label for pair in pairs])
        reach = max([5.0, *(abs(b) for pair in pairs for b in pair.summary["accuracy"]["bootstrap_95"] or [])])
        axes.set_xlim(-1.1 * reach, 1.1 * reach)
        axes.set_xlabel("accuracy, second arm minus first, points")

    lines = []
    for pair in pairs:
        block, (left, right) = pair.summary["accuracy"], pair.arms
        counts = [f"{block[arm]['correct']}/{block[arm]['n']}" for arm in (left, right)]
        lines.append([pair.label, f"{left} {counts[0]}", f"{right} {counts[1]}", change(block)])
    data = table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], lines)
    return figure(
        name,
        0.9 + 0.4 * len(pairs),
        draw,
        "Paired accuracy difference with its bootstrap 95 % interval; zero means that the construction costs nothing.",
        "One dot with an interval bar a run. " + "; ".join(f"{a}: {b}, {c}, {d}" for a, b, c, d in lines) + ".",
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
    counts = [[sum(a <= i < b for i in indices) for a, b in itertools.pairwise(edges)] for _, indices in shown]

    def draw(axes: "Axes") -> None:
        for index, (_, indices) in enumerate(shown):
            style = {"color": colour(SERIES[index % 4]), "hatch": ("", "///", "...", "xx")[index % 4]}
            axes.hist(indices, bins=edges, alpha=0.75, edgecolor=colour("page"), **style)  # type: ignore[arg-type]
        axes.set_xlabel("first differing token, counted from the boundary")
        axes.set_ylabel("rows")
        whole_numbers(axes.yaxis)
        legend(axes, [pair.label for pair, _ in shown], [{"patch": colour(SERIES[i % 4])} for i in range(len(shown))])

    lines = [[f"{a} to {b - 1}", *(str(c[k]) for c in counts)] for k, (a, b) in enumerate(itertools.pairwise(edges))]
    spread = "; ".join(f"{p.label}: {_spread(p.summary['first_divergence'])}" for p, _ in shown)
    quiet = [pair.label for pair, indices in found if all(i is None for i in indices)]
    none = f" No row diverges in {', '.join(quiet)}." if quiet else ""
    return figure(
        name,
        2.9,
        draw,
        f"Where the suffixes of the two constructions first differ.{none}",
        f"Histogram of first divergences. {spread}.{none}",
        table("Rows by first differing token", ["token", *(pair.label for pair, _ in shown)], lines),
    )


def drift_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Median relative L2 of K and of V by layer, on a logarithmic axis; bit-exact layers stand on the floor."""
    curves = []
    for pair in pairs:
        for tensor in ("key", "value"):
            layers = [[layer[tensor]["relative_l2"] for layer in c["cache"]["layers"]] for c in pair.comparisons]
            curves.append((f"{pair.label}, {tensor[0].upper()}", _medians(layers)))
    positive = [value for _, curve in curves for value in curve if value]
    if not positive:
        return None
    floor = 10.0 ** (math.floor(math.log10(min(positive))) - 1)

    def draw(axes: "Axes") -> None:
        for index, (_, curve) in enumerate(curves):
            heights = [value if value else floor for value in curve]
            axes.plot(range(len(curve)), heights, markersize=4, linewidth=1.4, **line_look(index))
        decades(axes, floor, max(positive), any(value == 0 for _, curve in curves for value in curve))
        whole_numbers(axes.xaxis)
        axes.set_xlabel("layer")
        axes.set_ylabel("relative L2, median")
        legend(axes, [label for label, _ in curves], [line_look(i) for i in range(len(curves))])

    depth = max(len(curve) for _, curve in curves)
    lines = [[str(k), *(number(c[k]) if k < len(c) else "" for _, c in curves)] for k in range(depth)]
    ends = "; ".join(
        f"{label}: {number(curve[0])} in layer 0, {number(curve[-1])} in the last" for label, curve in curves
    )
    return figure(
        name,
        3.2 + 0.13 * len(curves),
        draw,
        "Drift of the boundary cache by layer, keys (K) and values (V), median over rows; 0 is bit-exact.",
        f"Lines over the layers. {ends}.",
        table("Median relative L2 by layer", ["layer", *(label for label, _ in curves)], lines),
    )


def _medians(rows: Sequence[Sequence[float | None]]) -> list[float]:
    depth = max((len(row) for row in rows), default=0)
    columns = [[v for row in rows if k < len(row) and (v := row[k]) is not None] for k in range(depth)]
    return [statistics.median(column) if column else 0.0 for column in columns]


def _edges(largest: int) -> list[int]:
    """Whole bin edges from 0 beyond `largest`: at most 24 bins of a round width."""
    width = next(w for k in range(9) for w in (10**k, 2 * 10**k, 5 * 10**k) if largest < 24 * w)
    return list(range(0, largest + width + 1, width))


def _place(place: int, index: int, series: Sequence[object]) -> float:
    return place + (index - (len(series) - 1) / 2) * min(0.25, 0.7 / len(series))


def _rate(block: dict[str, Any] | None) -> str:
    return rate(block) if block else "not scored"


def _spread(block: dict[str, Any]) -> str:
    return (
        f"{block['n']} rows, median {number(block['median'])}, range {number(block['min'])} to {number(block['max'])}"
    )
