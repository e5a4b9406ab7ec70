"""The figures of paired comparisons and transplants, and why suffixes diverge where they do.

No statistic is computed here beyond medians and counts of the ledger's values.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.report.blocks import Block, Figure, Table, column_table, table
from experiments.report.charts import NO_MARK, cells, dots, histogram, lines, scatter
from experiments.report.runs import CONSTRUCTIONS, TRANSPLANTS, ArmPair, Pair, Run, follows, pairs
from experiments.report.values import change, number, rate, scalar, words
from experiments.run.ledger import row_key


def pair_blocks(name: str, runs: Sequence[Run]) -> list[Block]:
    """Returns the figures of all comparisons of finished runs, why each diverges, and the transplants of each run."""
    compared = [pair for run in runs for pair in pairs(run)]
    if not compared:
        return []
    scored = [pair for pair in compared if "accuracy" in pair.summary]
    found: list[Block | None] = [rates_figure(f"{name}-rates", compared)]
    found += [accuracy_figure(f"{name}-accuracy", scored)] if scored else []
    found += [divergence_figure(f"{name}-divergence", compared), drift_figure(f"{name}-drift", compared)]
    found += [block for k, pair in enumerate(compared) for block in why_blocks(f"{name}-why-{k}", pair)]
    found += [transplant_figure(f"{run.anchor}-grid", run) for run in runs]
    return [block for block in found if block is not None]


def rates_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Returns disagreement rates with their Wilson 95 % intervals, a series per pair."""
    keys = [f"{key}_disagreement" for key in ("suffix", "merge", "answer", "correctness")]
    keys = [key for key in keys if any(key in pair.summary for pair in pairs)]
    columns = [(pair.label, {words(k): rate(pair.summary[k]) for k in keys if k in pair.summary}) for pair in pairs]
    data = column_table("Disagreement of the two arms", "endpoint", columns, "not scored")
    caption = "Share of rows on which the two constructions disagree, with Wilson 95 % intervals."
    series = [(pair.label, [_percent(pair.summary.get(key)) for key in keys]) for pair in pairs]
    return dots(name, caption, data, series, "rows that disagree, %", (-2, 102))


def _percent(block: dict[str, Any] | None) -> tuple[float, ...]:
    """A rate and its interval."""
    if block is None or block["rate"] is None:
        return NO_MARK
    return tuple(100 * value for value in (block["rate"], *block["wilson_95"]))


def accuracy_figure(name: str, pairs: Sequence[Pair]) -> Figure:
    """Returns the paired accuracy difference with its bootstrap interval, a line per pair."""
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
    data = table("Accuracy of the two arms", ["run", "first arm", "second arm", "paired difference"], rows)
    axis = "accuracy, second arm minus first, points"
    reach = max([5.0, *(abs(value) for mark in marks for value in mark if not math.isnan(value))])
    return dots(name, caption, data, [("", marks)], axis, (-1.1 * reach, 1.1 * reach))


def divergence_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the histogram of the first diverging suffix token; None where nothing diverges."""
    found = [(pair.label, [one.first for one in pair.rows if one.first is not None]) for pair in pairs]
    largest = max((max(indices, default=-1) for _, indices in found), default=-1)
    if largest < 0:
        return None
    width = next(w for k in range(9) for w in (10**k, 2 * 10**k, 5 * 10**k) if largest < 24 * w)  # at most 24 bins
    edges = list(range(0, largest + width + 1, width))
    bins = list(itertools.pairwise(edges))
    series, columns = [(label, indices) for label, indices in found if indices], []
    for label, indices in series:
        columns.append((label, {f"{a} to {b - 1}": str(sum(a <= i < b for i in indices)) for a, b in bins}))
    quiet = ", ".join(label for label, indices in found if not indices)
    caption = "Where the suffixes of the two constructions first differ."
    caption += f" No row diverges in {quiet}." if quiet else ""
    data = column_table("Rows by first differing token", "token", columns)
    return histogram(name, caption, data, series, edges, "first differing token after the boundary")


def drift_figure(name: str, pairs: Sequence[Pair]) -> Figure | None:
    """Returns the median relative L2 of K and of V by layer; None where every layer is bit-exact."""
    series = []
    for pair, tensor in itertools.product(pairs, ("key", "value")):
        points = []
        for k, layer in enumerate(zip(*(one.entry["cache"]["layers"] for one in pair.rows))):
            drift = [one[tensor]["relative_l2"] for one in layer]
            points.append((k, statistics.median([value for value in drift if value is not None] or [0.0])))
        series.append((f"{pair.label}, {tensor[0].upper()}", points))
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
    data = table("Rows by the suffix they follow", ["state", *sides], states)
    return cells(name, caption, data, found, "suffix that is followed")


def why_blocks(name: str, pair: Pair) -> list[Block]:
    """Returns counts, drawing and rows of one comparison: the margin at each first divergence against the drift of the
    boundary logits. Empty where nothing diverges."""
    found = [one for one in pair.rows if one.first is not None]
    free = [m for one in pair.rows for m in one.row["arms"][pair.arms[0]].get("margins", []) if m is not None]
    known = [one for one in found if one.margin is not None]
    return [_why_counts(pair, known, free), _why_figure(name, pair, found, free)] if known and free else []


def _why_counts(pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Table:
    """How many first divergences lie within the drift of the row's own boundary logits, beside the base rate."""
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
    return table(f"Why here, {pair.label}: the first differing token", ["what", "count"], list(counts.items()))


def _why_figure(name: str, pair: Pair, found: Sequence[ArmPair], free: Sequence[float]) -> Figure:
    """Margin over drift, one mark per row and arm; the diagonal separates what the drift can turn from the rest."""
    points = [[(one.drift, m) for one in found if (m := one.margins[k]) is not None] for k in (0, 1)]
    flat = [point for arm in points for point in arm]
    shaded = f"{sum(margin <= drift for drift, margin in flat)} of {len(flat)} marks"
    caption = (
        f"{pair.label}: each arm's margin at the first divergence over the largest difference of the two boundary "
        f"logits. In the shaded half, with {shaded}, the drift at the boundary is at least the margin. Ties are on the "
        "bottom line. The drift at the divergence itself is not recorded."
    )
    header = ["row", "first differing token", *(f"margin, {arm}" for arm in pair.arms)]
    header += [*(f"ULP, {arm}" for arm in pair.arms), "boundary drift, mean", "boundary drift, largest"]
    rows = []
    for one in found:
        margins = ["forced" if margin is None else number(margin) for margin in one.margins]
        ulps = ["not recorded" if ulp is None else scalar(ulp) for ulp in one.ulps]
        drift = [number(one.entry["logits"]["mean_abs"]), number(one.drift)]
        rows.append([row_key(one.row), str(one.first), *margins, *ulps, *drift, str(one.before)])
    data = table(f"Margins where suffixes part, {pair.label}", [*header, "choices as close before"], rows)
    names = ("largest difference of the boundary logits", "margin at the divergence")
    level = ("median of all free choices", statistics.median(free))
    return scatter(name, caption, data, list(zip(pair.arms, points)), names, level)
