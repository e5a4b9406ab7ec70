"""The figures of paired comparisons and transplants, and why suffixes diverge where they do.

No statistic is computed here beyond medians and counts of the ledger's values.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.report.blocks import Block, Figure, Table, column_table
from experiments.report.charts import NO_MARK, cells, dots, histogram, lines, scatter
from experiments.report.runs import CONSTRUCTIONS, TRANSPLANTS, ArmPair, Pair, Run, follows, pairs
from experiments.report.values import change, number, rate, scalar, words
from experiments.run.ledger import row_key


def pair_blocks(name: str, runs: Sequence[Run]) -> list[Block]:
    """Returns the figures of all comparisons of finished runs, why each diverges, and the transplants of each run."""
    compared = [pair for run in runs for pair in pairs(run)]
    if not compared:
        return []
    found: list[Block | None] = [
        rates_figure(f"{name}-rates", compared),
        accuracy_figure(f"{name}-accuracy", [pair for pair in compared if "accuracy" in pair.summary]),
        divergence_figure(f"{name}-divergence", compared),
        drift_figure(f"{name}-drift", compared),
        *(block for k, pair in enumerate(compared) for block in why_blocks(f"{name}-why-{k}", pair)),
        *(transplant_figure(f"{run.anchor}-grid", run) for run in runs),
    ]
    return [block for block in found if block is not None]


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Returns disagreement rates with their Wilson 95 % intervals, a series per pair."""
    keys = [f"{key}_disagreement" for key in ("suffix", "merge", "answer", "correctness")]
    found: list[tuple[str, dict[str, Any]]] = [(pair.label, {**pair.summary}) for pair in pairs]
    keys = [key for key in keys if any(key in summary for _, summary in found)]
    columns = [(label, {words(k): rate(summary[k]) for k in keys if k in summary}) for label, summary in found]
    data = column_table("Disagreement of the two arms", "endpoint", columns, "not scored")
    caption = "Share of rows on which the two constructions disagree, with Wilson 95 % intervals."
    series = [(label, [_percent(summary.get(key)) for key in keys]) for label, summary in found]
    return dots(name, caption, data, series, "rows that disagree, %", (-2, 102))


def _percent(block: dict[str, Any] | None) -> tuple[float, ...]:
    """Returns a rate and its interval in percent."""
    if block is None or block["rate"] is None:
        return NO_MARK
    return tuple(100 * value for value in (block["rate"], *block["wilson_95"]))


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the paired accuracy difference with its bootstrap interval, a line per scored pair; None without one."""
    rows, marks = [], []
    for pair in pairs:
        block = pair.summary["accuracy"]
        counts = [f"{arm} {block[arm]['correct']}/{block[arm]['n']}" for arm in pair.arms]
        rows.append([pair.label, *counts, change(block)])
        points, bounds = block["difference_points"], None if block.get("bootstrap_note") else block["bootstrap_95"]
        marks.append(NO_MARK if points is None else (points, *(bounds or NO_MARK[1:])))
    caption = (
        "Paired accuracy difference with its bootstrap 95 % interval. A dot without a bar has no interval: every row "
        "has the same difference. Zero with few discordant rows does not establish that the constructions are equal."
    )
    data = Table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], rows)
    axis = "accuracy, second arm minus first, points"
    reach = 1.1 * max([5.0, *(abs(value) for mark in marks for value in mark if not math.isnan(value))])
    return dots(name, caption, data, [("", marks)], axis, (-reach, reach)) if pairs else None


def divergence_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the histogram of the first diverging suffix token; None where nothing diverges."""
    found = [(pair.label, [one.first for one in pair.rows if one.first is not None]) for pair in pairs]
    series = [(label, indices) for label, indices in found if indices]
    if not series:
        return None
    largest = max(max(indices) for _, indices in series)
    width = next(w for k in range(9) for w in (10**k, 2 * 10**k, 5 * 10**k) if largest < 24 * w)  # at most 24 bins
    edges = range(0, largest + width + 1, width)
    columns = [
        (label, {f"{a} to {b - 1}": str(sum(a <= i < b for i in indices)) for a, b in itertools.pairwise(edges)})
        for label, indices in series
    ]
    quiet = ", ".join(label for label, indices in found if not indices)
    caption = "Where the suffixes of the two constructions first differ."
    caption += f" No row diverges in {quiet}." if quiet else ""
    data = column_table("Rows by first differing token", "token", columns)
    return histogram(name, caption, data, series, edges, "first differing token after the boundary")


def drift_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the median relative L2 of K and of V by layer; None where every layer is bit-exact."""
    series = []
    for pair, tensor in itertools.product(pairs, ("key", "value")):
        layers = zip(*(one.entry["cache"]["layers"] for one in pair.rows))
        drifts = [[one[tensor]["relative_l2"] for one in layer] for layer in layers]
        medians = [statistics.median([one for one in drift if one is not None] or [0.0]) for drift in drifts]
        series.append((f"{pair.label}, {tensor[0].upper()}", list(enumerate(medians))))
    if not any(drift for _, points in series for _, drift in points):
        return None
    columns = [(label, {str(k): number(drift) for k, drift in points}) for label, points in series]
    caption = "Drift of the boundary cache by layer, keys (K) and values (V), median over rows; exact means equal bits."
    data = column_table("Median relative L2 by layer", "layer", columns)
    return lines(name, caption, data, series, ("layer", "relative L2, median"), "exact")


def transplant_figure(name: str, run: Run) -> Figure | None:
    """Returns how many divergent rows follow which construction's suffix, by recipient and donor of the cache; None
    where nothing diverges or is transplanted."""
    arms_of = [row["arms"] for row in run.rows if set(TRANSPLANTS) <= set(row.get("arms", ()))]
    divergent = [arms for arms in arms_of if follows(arms, "prefill") != follows(arms, "incremental")]
    if not divergent:
        return None
    sides = (*CONSTRUCTIONS, "neither")
    states, found = [], []
    for arm, (donor, recipient) in TRANSPLANTS.items():
        followed = [follows(arms, arm) for arms in divergent]
        counts = [followed.count(side) for side in sides]
        states.append([f"{recipient} recipient, {donor} cache", *map(str, counts)])
        found.append([(count, count / len(divergent)) for count in counts])
    caption = (
        f"{run.name}: whose suffix each of the {len(divergent)} divergent rows follows. Where the cache carries the "
        "trajectory, a state's suffixes are those of its cache."
    )
    data = Table("Rows by the suffix they follow", ["state", *sides], states)
    return cells(name, caption, data, found, "suffix that is followed")


def why_blocks(name: str, pair: Pair) -> list[Block]:
    """Returns counts, drawing and rows of one comparison: the margin at each first divergence against the drift of the
    boundary logits. Empty where nothing diverges."""
    found = [one for one in pair.rows if one.first is not None]
    free = [m for one in pair.rows for m in one.row["arms"][pair.arms[0]].get("margins", []) if m is not None]
    known = [one for one in found if one.margin is not None]
    return [_why_counts(pair, known, free), _why_figure(name, pair, found, free)] if known and free else []


def _why_counts(pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Table:
    """Counts first divergences within the drift of the row's own boundary logits, beside the base rate."""
    within = sum(one.margin is not None and one.margin <= one.drift for one in found)
    typical = statistics.median(one.drift for one in found)
    base = sum(margin <= typical for margin in free)
    ulps, before = [one.ulp for one in found if one.ulp is not None], [one.before for one in found]
    near = f"all free choices of {pair.arms[0]} with a margin of at most {number(typical)}, the median difference"
    counts = {
        "smaller margin at most the largest difference of the row's boundary logits": f"{within} of {len(found)} rows",
        "smaller margin within 1 ULP of the best logit": f"{sum(u <= 1 for u in ulps)} of {len(ulps)} rows",
        "it is the first choice of the row that is so close": f"{before.count(0)} of {len(found)} rows",
        "choices as close before it, at which both arms agreed": f"median {statistics.median(before):g}",
        near: f"{base} of {len(free)} = {100 * base / len(free):.1f} %",
    }
    return Table(f"Why here, {pair.label}: the first differing token", ["what", "count"], list(counts.items()))


def _why_figure(name: str, pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Figure:
    """Draws margin over drift, one mark per row and arm; below the diagonal the drift can turn the choice."""
    points = [[(one.drift, m) for one in found if (m := one.margins[k]) is not None] for k in (0, 1)]
    flat = [point for arm in points for point in arm]
    shaded = f"{sum(margin <= drift for drift, margin in flat)} of {len(flat)} marks"
    caption = (
        f"{pair.label}: each arm's margin at the first divergence over the largest difference of the two boundary "
        f"logits. In the shaded half, with {shaded}, the drift at the boundary is at least the margin. Ties are on the "
        "bottom line. The drift at the divergence itself is not recorded."
    )
    rows = []
    for one in found:
        margins = ["forced" if margin is None else number(margin) for margin in one.margins]
        ulps = ["not recorded" if ulp is None else scalar(ulp) for ulp in one.ulps]
        drift = [number(one.entry["logits"]["mean_abs"]), number(one.drift)]
        rows.append([row_key(one.row), str(one.first), *margins, *ulps, *drift, str(one.before)])
    header = ["row", "first differing token", *(f"{what}, {arm}" for what in ("margin", "ULP") for arm in pair.arms)]
    header += ["boundary drift, mean", "boundary drift, largest", "choices as close before"]
    data = Table(f"Margins where suffixes part, {pair.label}", header, rows)
    names = ("largest difference of the boundary logits", "margin at the divergence")
    level = ("median of all free choices", statistics.median(free))
    return scatter(name, caption, data, list(zip(pair.arms, points)), names, level)
