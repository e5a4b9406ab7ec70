"""The figures of paired comparisons and transplants, and why suffixes diverge where they do.

No statistic is computed here beyond medians and counts of the ledger's values.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.report.blocks import Block, Figure, Table, column_table, table
from experiments.report.charts import WIDTH, Chart, cells, dots, histogram, linear, lines, logarithmic
from experiments.report.runs import CONSTRUCTIONS, TRANSPLANTS, ArmPair, Pair, follows
from experiments.report.values import change, number, rate, scalar
from experiments.run.ledger import row_key

ENDPOINTS = ("suffix", "merge", "answer", "correctness")


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Returns disagreement rates with their Wilson 95 % intervals, a series per pair."""
    blocks = [(pair.label, [pair.summary.get(f"{key}_disagreement") for key in ENDPOINTS]) for pair in pairs]
    kept = [place for place in range(len(ENDPOINTS)) if any(found[place] for _, found in blocks)]
    columns = [
        (label, {ENDPOINTS[k]: rate(one) if (one := found[k]) else "not scored" for k in kept})
        for label, found in blocks
    ]
    series = [
        (label, [(100 * one["rate"], [100 * bound for bound in one["wilson_95"]])
                 if (one := found[k]) and one["rate"] is not None else None for k in kept])
        for label, found in blocks
    ]  # fmt: skip
    caption = "Share of rows on which the two constructions disagree, with Wilson 95 % intervals."
    data = column_table("Disagreement of the two arms", "endpoint", columns)
    return dots(name, caption, data, series, "rows that disagree, %", linear(-2, 102))


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Returns the paired accuracy difference with its bootstrap interval, a line per pair."""
    rows, marks = [], []
    for pair in pairs:
        block = pair.summary["accuracy"]
        counts = [f"{arm} {block[arm]['correct']}/{block[arm]['n']}" for arm in pair.arms]
        rows.append([pair.label, *counts, change(block)])
        bounds = None if block.get("bootstrap_note") else block["bootstrap_95"]
        marks.append(None if block["difference_points"] is None else (block["difference_points"], bounds))
    reach = 1.1 * max([5.0, *(abs(bound) for mark in marks if mark for bound in mark[1] or [mark[0]])])
    return dots(
        name,
        "Paired accuracy difference with its bootstrap 95 % interval. A dot without a bar has no interval: every row "
        "has the same difference. Zero with few discordant rows does not establish that the constructions are equal.",
        table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], rows),
        [("", marks)],
        "accuracy, second arm minus first, points",
        linear(-reach, reach),
    )


def divergence_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the histogram of the first diverging suffix token; None where nothing diverges."""
    found = [(pair.label, [one.first for one in pair.of_rows() if one.first is not None]) for pair in pairs]
    shown = [(label, indices) for label, indices in found if indices]
    if not shown:
        return None
    largest = max(max(indices) for _, indices in shown)
    width = next(w for k in range(9) for w in (10**k, 2 * 10**k, 5 * 10**k) if largest < 24 * w)  # at most 24 bins
    edges = range(0, largest + width + 1, width)
    counts = [(label, [sum(a <= i < a + width for i in indices) for a in edges[:-1]]) for label, indices in shown]
    bins = [f"{a} to {a + width - 1}" for a in edges[:-1]]
    rows = [[name, *(str(found[k]) for _, found in counts)] for k, name in enumerate(bins)]
    quiet = ", ".join(label for label, indices in found if not indices)
    caption = "Where the suffixes of the two constructions first differ."
    return histogram(
        name,
        caption + (f" No row diverges in {quiet}." if quiet else ""),
        table("Rows by first differing token", ["token", *(label for label, _ in shown)], rows),
        counts,
        edges,
        "first differing token after the boundary",
    )


def drift_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the median relative L2 of K and of V by layer; None where every layer is bit-exact."""
    series = []
    for pair, tensor in itertools.product(pairs, ("key", "value")):
        layers = zip(*(one.entry["cache"]["layers"] for one in pair.of_rows()))
        drift = [[one[tensor]["relative_l2"] for one in layer] for layer in layers]
        medians = [statistics.median([v for v in values if v is not None] or [0.0]) for values in drift]
        series.append((f"{pair.label}, {tensor[0].upper()}", list(enumerate(medians))))
    if not any(value for _, points in series for _, value in points):
        return None
    return lines(
        name,
        "Drift of the boundary cache by layer, keys (K) and values (V), median over rows; exact means equal bits.",
        column_table(
            "Median relative L2 by layer",
            "layer",
            [(label, {str(k): number(value) for k, value in points}) for label, points in series],
        ),
        series,
        ("layer", "relative L2, median"),
        "exact",
    )


def transplant_figure(name: str, label: str, rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Returns recipient against cache donor: how many divergent rows follow which construction's suffix."""
    arms_of = [row["arms"] for row in rows if row.get("arms")]
    divergent = [arms for arms in arms_of if follows(arms, "prefill") != follows(arms, "incremental")]
    if not divergent:
        return None
    sides = (*CONSTRUCTIONS, "neither")
    counts = {cell: Counter(follows(arms, arm) for arms in divergent) for arm, cell in TRANSPLANTS.items()}
    grid = [
        (
            recipient,
            [
                (
                    [f"{counts[recipient, donor][side]} {side}" for side in sides],
                    0.08 + 0.4 * counts[recipient, donor][donor] / len(divergent),
                    "first" if donor == "incremental" else "second",
                )
                for donor in CONSTRUCTIONS
            ],
        )
        for recipient in CONSTRUCTIONS
    ]
    states = [
        [f"{recipient} recipient, {donor} cache", *(str(found[side]) for side in sides)]
        for (recipient, donor), found in counts.items()
    ]
    return cells(
        name,
        f"{label}: whose suffix each of the {len(divergent)} divergent rows follows. Where the cache "
        "carries the trajectory, every column holds one kind.",
        table("Rows by the suffix they follow", ["state", *sides], states),
        grid,
        CONSTRUCTIONS,
        ("donor of the whole cache", "recipient of the cache"),
    )


def why_blocks(name: str, pair: Pair) -> list[Block]:
    """Returns counts, drawing and rows of one comparison: the margin at each first divergence against the drift of the
    boundary logits. Empty where nothing diverges."""
    found = [one for one in pair.of_rows() if one.first is not None]
    free = [m for row in pair.rows for m in row["arms"][pair.arms[0]].get("margins", []) if m is not None]
    known = [one for one in found if one.margin is not None]
    return [_why_counts(pair, known, free), _why_figure(name, pair, found, free)] if known and free else []


def _why_counts(pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Table:
    """How many first divergences lie within the drift of the row's own boundary logits, beside the base rate."""
    within = sum(one.margin is not None and one.margin <= one.drift for one in found)
    typical = statistics.median(one.drift for one in found)
    base = sum(margin <= typical for margin in free)
    ulps, before = [one.ulp for one in found if one.ulp is not None], [one.before for one in found]
    counts = {
        "smaller margin at most the largest difference of the row's boundary logits": f"{within} of {len(found)} rows",
        "smaller margin within 1 ULP of the best logit": f"{sum(u <= 1 for u in ulps)} of {len(ulps)} rows",
        "it is the first choice of the row that is so close": f"{before.count(0)} of {len(found)} rows",
        "choices as close before it, at which both arms agreed": f"median {statistics.median(before):g}",
        f"all free choices of {pair.arms[0]} with a margin of at most {number(typical)}, the median difference":
            f"{base} of {len(free)} = {100 * base / len(free):.1f} %",
    }  # fmt: skip
    return table(f"Why here, {pair.label}: the first differing token", ["what", "count"], list(counts.items()))


def _why_figure(name: str, pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Figure:
    """Margin over drift, one mark per row and arm; the diagonal separates what the drift can turn from the rest."""
    points = [[(one.drift, m) for one in found if (m := one.margins[k]) is not None] for k in (0, 1)]
    flat = [point for arm in points for point in arm]
    middle = statistics.median(free)

    def draw() -> str:
        x, y = logarithmic([drift for drift, _ in flat], "0"), logarithmic([middle, *(m for _, m in flat)], "tie")
        legend = [*pair.arms] + ["dotted: median of all free choices"] * bool(middle)
        chart = Chart(x, y, ("largest difference of the boundary logits", "margin at the divergence"), legend, 210)
        ends = [(chart.x(v), min(max(chart.y(v), chart.top), chart.bottom)) for v, _ in x.ticks if v]
        chart.polygon([(ends[0][0], chart.bottom), *ends, (ends[-1][0], chart.bottom)], "muted", 0.15)
        chart.line(ends, "muted", 1.2, "6 3")
        if middle:
            chart.line([(chart.left, chart.y(middle)), (WIDTH - 14, chart.y(middle))], "ink", 1, "2 3")
        for index, arm in enumerate(points):
            for drift, margin in arm:
                chart.mark(index, chart.x(drift), chart.y(margin))
        return chart.svg()

    shaded = f"{sum(margin <= drift for drift, margin in flat)} of {len(flat)} marks"
    caption = (
        f"{pair.label}: each arm's margin at the first divergence over the largest difference of the two boundary "
        f"logits. In the shaded half, with {shaded}, the drift at the boundary is at least the margin. Ties are on the "
        "bottom line. The drift at the divergence itself is not recorded."
    )
    return Figure(name, caption, _why_rows(pair, found), draw)


def _why_rows(pair: Pair, found: Sequence[ArmPair]) -> Table:
    header = ["row", "first differing token", *(f"margin, {arm}" for arm in pair.arms)]
    header += [*(f"ULP, {arm}" for arm in pair.arms), "boundary drift, mean", "boundary drift, largest"]
    rows = [
        [
            row_key(one.row),
            str(one.first),
            *("forced" if margin is None else number(margin) for margin in one.margins),
            *("not recorded" if ulp is None else scalar(ulp) for ulp in one.ulps),
            number(one.entry["logits"]["mean_abs"]),
            number(one.drift),
            str(one.before),
        ]
        for one in found
    ]
    return table(f"Margins where suffixes part, {pair.label}", [*header, "choices as close before"], rows)
