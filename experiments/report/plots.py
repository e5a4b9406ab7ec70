"""The drawings of paired comparisons: rates with Wilson bars, accuracy, first divergences, drift by layer.

Each draws the numbers that its table shows and computes no statistic beyond medians of the ledger's values. Series
differ by marker and line as well as by colour.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from experiments.report.blocks import Figure, table
from experiments.report.runs import Pair
from experiments.report.svg import Look, Plot, fitted, line_look, look, powers, text_width, ticks
from experiments.report.values import change, number, rate, words

ENDPOINTS = ("suffix_disagreement", "merge_disagreement", "answer_disagreement", "correctness_disagreement")
ROW = 15.0  # height of one bar in a plot of named rows


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Disagreement rates with their Wilson 95 % intervals, one series per pair."""
    endpoints = [key for key in ENDPOINTS if any(key in pair.summary for pair in pairs)]
    labels = [words(key).removesuffix(" disagreement") for key in endpoints]
    height = ROW * len(pairs) + 8
    plot = Plot(height * len(endpoints), 14 + max(map(text_width, labels)), _legend([p.label for p in pairs], look))
    x = plot.x_scale(0, 100)
    plot.x_axis([(x(v), f"{v:g}") for v in ticks(0, 100)], "rows that disagree, %", grid=True)
    middles = [plot.y0 + height * (k + 0.5) for k in range(len(endpoints))]
    plot.y_axis(list(zip(middles, labels)))
    for middle, key in zip(middles, endpoints):
        for index, pair in enumerate(pairs):
            block = pair.summary.get(key)
            if block and block["rate"] is not None:
                y = middle + (index - (len(pairs) - 1) / 2) * ROW
                _bar(plot, x, y, 100 * block["rate"], [100 * bound for bound in block["wilson_95"]], look(index))
    lines = [[words(key), *(_rate(pair.summary.get(key)) for pair in pairs)] for key in endpoints]
    data = table("Disagreement of the two arms", ["endpoint", *(pair.label for pair in pairs)], lines)
    told = "; ".join(f"{line[0]}: " + ", ".join(line[1:]) for line in lines)
    return Figure(
        name,
        "Share of rows on which the two constructions disagree, with Wilson 95 % intervals.",
        f"Dots with interval bars, one series per run and precision. {told}.",
        data,
        plot.svg(),
    )


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """The paired accuracy difference with its bootstrap interval, one line per pair; no bar where there is none."""
    blocks = [pair.summary["accuracy"] for pair in pairs]
    reach = max([5.0, *(abs(b) for block in blocks for b in block["bootstrap_95"] or [])]) * 1.1
    labels = [fitted(pair.label, 190) for pair in pairs]
    plot = Plot(24.0 * len(pairs), 14 + max(map(text_width, labels)))
    x = plot.x_scale(-reach, reach)
    plot.x_axis([(x(v), f"{v:+g}") for v in ticks(-reach, reach, 4)], "accuracy, second arm minus first, points", True)
    plot.line(x(0), plot.y0, x(0), plot.y1, "muted")
    middles = [plot.y0 + 24 * (k + 0.5) for k in range(len(pairs))]
    plot.y_axis(list(zip(middles, labels)))
    for index, (y, block) in enumerate(zip(middles, blocks)):
        if block["difference_points"] is not None:
            bounds = None if block.get("bootstrap_note") else block["bootstrap_95"]
            _bar(plot, x, y, block["difference_points"], bounds, look(index))
    lines = []
    for pair, block in zip(pairs, blocks):
        counts = [f"{arm} {block[arm]['correct']}/{block[arm]['n']}" for arm in pair.arms]
        lines.append([pair.label, *counts, change(block)])
    data = table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], lines)
    return Figure(
        name,
        "Paired accuracy difference with its bootstrap 95 % interval. A dot without a bar has no interval: every row "
        "has the same difference. Zero with few discordant rows does not establish that the constructions are equal.",
        "One dot with an interval bar per run. " + "; ".join(f"{a}: {b}, {c}, {d}" for a, b, c, d in lines) + ".",
        data,
        plot.svg(),
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
    most = max(map(max, counts))
    plot = Plot(170, 44, _legend([pair.label for pair, _ in shown], look))
    x, y = plot.x_scale(edges[0], edges[-1]), plot.y_scale(0, most)
    plot.y_axis([(y(v), f"{v:g}") for v in ticks(0, most, whole=True)], "rows", grid=True)
    for index, column in enumerate(counts):
        share = 1 / len(counts)
        for (a, b), count in zip(bins, column):
            width = (x(b) - x(a)) * 0.9 * share
            plot.rect(x(a) + index * width, y(count), width, plot.y1 - y(count), look(index).colour)
    plot.x_axis([(x(v), f"{v:g}") for v in ticks(0, edges[-1], whole=True)], "first differing token after the boundary")
    lines = [[f"{a} to {b - 1}", *(str(column[k]) for column in counts)] for k, (a, b) in enumerate(bins)]
    spread = "; ".join(f"{p.label}: {_spread(p.summary['first_divergence'])}" for p, _ in shown)
    quiet = [pair.label for pair, indices in found if all(i is None for i in indices)]
    none = f" No row diverges in {', '.join(quiet)}." if quiet else ""
    return Figure(
        name,
        f"Where the suffixes of the two constructions first differ.{none}",
        f"Histogram of first divergences. {spread}.{none}",
        table("Rows by first differing token", ["token", *(pair.label for pair, _ in shown)], lines),
        plot.svg(),
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
    ends = "; ".join(
        f"{label}: {number(curve[0])} in layer 0, {number(curve[-1])} in the last" for label, curve in curves.items()
    )
    places = [(float(k), str(k)) for k in range(depth)]
    return Figure(
        name,
        "Drift of the boundary cache by layer, keys (K) and values (V), median over rows; 0 is bit-exact.",
        f"Lines over the layers. {ends}.",
        table("Median relative L2 by layer", ["layer", *curves], lines),
        log_curves(places, curves, "layer", "relative L2, median"),
    )


def log_curves(
    places: Sequence[tuple[float, str]],
    curves: dict[str, Sequence[float | None]] | dict[str, list[float]],
    across: str,
    up: str,
    turn: float = 0.0,
    height: float = 180,
) -> str:
    """Curves on a logarithmic axis whose bottom line, "exact", stands for zero. places: (value, label) along x."""
    positive = [value for curve in curves.values() for value in curve if value]
    low = 10.0 ** math.floor(math.log10(min(positive, default=1e-8)))
    high = 10.0 ** math.ceil(math.log10(max(positive, default=1e-7)))
    high = high if high > low else low * 10
    exact = any(value == 0 for curve in curves.values() for value in curve)
    floor = low / 10 ** (0.12 * math.log10(high / low) + 0.3) if exact else low
    plot = Plot(height, 62, _legend(list(curves), line_look), bottom=54 if turn else 40)
    margin = 0.03 * ((places[-1][0] - places[0][0]) or 1)
    x, y = plot.x_scale(places[0][0] - margin, places[-1][0] + margin), plot.y_scale(floor, high, log=True)
    shown = places[:: 1 + len(places) // 14]
    plot.x_axis([(x(value), label) for value, label in shown], across, turn=turn)
    marks = [(y(v), f"1e{round(math.log10(v))}") for v in powers(low, high)]
    plot.y_axis([*marks, *([(y(floor), "exact")] if exact else [])], up, grid=True)
    for index, curve in enumerate(curves.values()):
        points = [(x(at), y(v or floor)) for (at, _), v in zip(places, curve) if v is not None]
        style = line_look(index)
        plot.path(points, style.colour, 1.4, style.dash)
        for point in points:
            plot.mark(*point, style, 2.6)
    return plot.svg()


def _legend(labels: Sequence[str], style: Callable[[int], Look]) -> list[tuple[str, Look]]:
    return [(label, style(index)) for index, label in enumerate(labels)]


def _bar(plot: Plot, x: Any, y: float, value: float, bounds: Sequence[float] | None, style: Look) -> None:
    """A mark with its interval, at height `y`."""
    if bounds is not None:
        plot.line(x(bounds[0]), y, x(bounds[1]), y, style.colour, 2.2)
    plot.mark(x(value), y, style)


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


def _spread(block: dict[str, Any]) -> str:
    return (
        f"{block['n']} rows, median {number(block['median'])}, range {number(block['min'])} to {number(block['max'])}"
    )
