"""The drawings of paired comparisons: rates with Wilson bars, accuracy, first divergences, drift by layer.

Each takes the numbers its table shows, draws them where matplotlib is installed, and never computes a statistic of its
own beyond medians of what the ledger holds. Series differ by marker and line as well as by colour.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness.markdown import number, rate
from experiments.reporting.document import Figure, Table, table
from experiments.reporting.runs import Pair
from experiments.reporting.style import PALETTE, SERIES
from experiments.reporting.svg import SETTINGS, available, drawing, to_svg
from experiments.reporting.values import change, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.4  # inches; at a phone's width the text is still 10 px high
MARKERS = "osD^"
LINES = ("-", "--", "-.", ":")
ENDPOINTS = ("suffix_disagreement", "merge_disagreement", "answer_disagreement", "correctness_disagreement")


def colour(name: str) -> str:
    """The light colour of a palette entry; the page swaps it for the reader's."""
    return PALETTE[name][0]


def figure(
    name: str, height: float, draw: Callable[["Axes"], None], caption: str, alternative: str, data: Table
) -> Figure:
    """One set of axes, drawn by `draw` where matplotlib is installed."""
    if not available():
        return Figure(name, caption, alternative, data, None)
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        made = drawing(WIDTH, height)
        draw(made.add_subplot())
        return Figure(name, caption, alternative, data, to_svg(made, name))


def look(index: int) -> dict[str, Any]:
    """Colour and marker of a series."""
    return {"color": colour(SERIES[index % 4]), "marker": MARKERS[index % 4]}


def line_look(index: int) -> dict[str, Any]:
    """Lines in couples: one colour a couple, its two lines solid and dashed."""
    return {"color": colour(SERIES[index // 2 % 4]), "marker": MARKERS[index % 4], "linestyle": LINES[index % 2]}


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Disagreement rates with their Wilson 95 % intervals, one series a pair."""
    endpoints = [key for key in ENDPOINTS if any(key in pair.summary for pair in pairs)]

    def draw(axes: "Axes") -> None:
        for index, pair in enumerate(pairs):
            for place, key in enumerate(endpoints):
                block = pair.summary.get(key)
                if block and block["rate"] is not None:
                    _bar(
                        axes,
                        block["rate"] * 100,
                        [b * 100 for b in block["wilson_95"]],
                        _place(place, index, pairs),
                        index,
                    )
        _rows(axes, [words(key).removesuffix(" disagreement") for key in endpoints])
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
                _bar(axes, block["difference_points"], block["bootstrap_95"], index, index)
        _rows(axes, [pair.label for pair in pairs])
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
        axes.yaxis.get_major_locator().set_params(integer=True)
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
        axes.xaxis.get_major_locator().set_params(integer=True)
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


def decades(axes: "Axes", floor: float, largest: float, exact: bool) -> None:
    """A logarithmic axis whose floor stands for zero, which it could not show."""
    powers = range(round(math.log10(floor)) + 1, math.ceil(math.log10(largest)) + 1)
    ticks = [*([(floor, "exact")] if exact else []), *((10.0**power, f"1e{power}") for power in powers)]
    axes.set_yscale("log")
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.minorticks_off()
    axes.set_ylim(floor / 1.6 if exact else floor * 6, 10.0 ** powers[-1] * 1.6)
    axes.grid(axis="y", linewidth=0.7)


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


def _bar(axes: "Axes", value: float, bounds: Sequence[float] | None, y: float, index: int) -> None:
    if bounds is not None:
        axes.plot(bounds, [y, y], color=look(index)["color"], linewidth=2.2, solid_capstyle="butt")
    axes.plot([value], [y], markersize=6, linestyle="none", **look(index))


def _rows(axes: "Axes", labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def legend(axes: "Axes", labels: Sequence[str], styles: Sequence[dict[str, Any]]) -> None:
    """Above the axes, so that it never covers a mark. styles: line properties, or {"patch": COLOUR} for an area."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=style["patch"], alpha=0.75) if "patch" in style else Line2D([], [], markersize=5, **style)
        for style in styles
    ]
    made = axes.legend(handles, list(labels), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9.5, borderpad=0.2)
    for text in made.get_texts():
        text.set_parse_math(False)


def _rate(block: dict[str, Any] | None) -> str:
    return rate(block) if block else "not scored"


def _spread(block: dict[str, Any]) -> str:
    return (
        f"{block['n']} rows, median {number(block['median'])}, range {number(block['min'])} to {number(block['max'])}"
    )
