"""Why here? The margin at each first divergence against the drift of the boundary logits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.blocks import Block, Figure, Table, table
from experiments.report.runs import Pair
from experiments.report.svg import Plot, look, powers, text_width
from experiments.report.values import number, scalar
from stats.margins import margin_ulps


@dataclass(frozen=True)
class Divergence:
    """One row's first divergence in one comparison."""

    row: str
    first: int  # index of the token in the suffix
    tokens: tuple[int | None, int | None]  # what each arm chose; None where its suffix has ended
    margins: tuple[float | None, float | None]  # best logit less the second best, per arm; None where forced
    ulps: tuple[float | None, float | None]  # the same in units in the last place of the best logit
    mean_drift: float  # mean |difference| of the two boundary logits
    max_drift: float  # the largest
    before: int  # earlier choices of the first arm whose margin is at most `max_drift`, and at which both agreed

    @property
    def margin(self) -> float | None:
        """The smaller margin of the two arms: how far the choice was from going the other way."""
        return min((m for m in self.margins if m is not None), default=None)

    @staticmethod
    def shown(margin: float | None, ulp: float | None) -> str:
        """'0.0625 (1 ULP)'; 'forced' where the arm had no choice or its suffix had ended."""
        if margin is None:
            return "forced"
        return (
            f"{number(margin)} (a tie)" if not margin else number(margin) + ("" if ulp is None else f" ({ulp:g} ULP)")
        )

    @property
    def ulp(self) -> float | None:
        """`margin` in ULP."""
        return min((u for u in self.ulps if u is not None), default=None)


def divergence(row: dict[str, Any], key: str, comparison: str, dtype: str) -> Divergence | None:
    """The first divergence of a row under one comparison; None where the suffixes are equal or not compared."""
    pair = row["comparisons"].get(comparison)
    first = pair["suffix"]["first_divergence"] if pair and "suffix" in pair else None
    if first is None:
        return None
    arms = [row["arms"][name] for name in comparison.split(":")]
    tops = pair["suffix"].get("tops", [None, None])
    margins = [_at(arm.get("margins", []), first) for arm in arms]
    ulps = [margin_ulps(margin, top, dtype) for margin, top in zip(margins, tops)]
    left, right = (_at(arm["suffix"], first) for arm in arms)
    drift = pair["logits"]
    mean, largest = drift["mean_abs"], drift["max_abs"]
    before = sum(margin is not None and margin <= largest for margin in arms[0].get("margins", [])[:first])
    return Divergence(key, first, (left, right), (margins[0], margins[1]), (ulps[0], ulps[1]), mean, largest, before)


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def why_blocks(name: str, pair: Pair) -> list[Block]:
    """Counts, drawing and rows of one comparison; empty where nothing diverges.

    The drift is the boundary's: at the divergence itself the ledger holds none.
    """
    left, _ = pair.arms
    found = [one for one in (divergence(row, key, pair.name, pair.dtype) for key, row in pair.rows) if one is not None]
    free = [m for _, row in pair.rows for m in row["arms"][left].get("margins", []) if m is not None]
    known = [one for one in found if one.margin is not None]
    if not known or not free:
        return []
    return [_statement(pair, known, free), _figure(name, pair, known, free), _table(pair, found)]


def _statement(pair: Pair, found: Sequence[Divergence], free: Sequence[float]) -> Table:
    """How many first divergences lie within the drift of the row's own boundary logits, beside the base rate."""
    within = sum(one.margin is not None and one.margin <= one.max_drift for one in found)
    typical = statistics.median(one.max_drift for one in found)
    base = sum(margin <= typical for margin in free)
    ulps = [one.ulp for one in found if one.ulp is not None]
    lines = [
        (
            "smaller margin at most the largest difference of the row's boundary logits",
            f"{within} of {len(found)} rows",
        ),
        ("smaller margin within 1 ULP of the best logit", f"{sum(u <= 1 for u in ulps)} of {len(ulps)} rows"),
        (
            "it is the first choice of the row that is so close",
            f"{sum(not o.before for o in found)} of {len(found)} rows",
        ),
        (
            "choices as close before it, at which both arms agreed",
            f"median {statistics.median(o.before for o in found):g}",
        ),
        (
            f"all free choices of {pair.arms[0]} with a margin of at most {number(typical)}, the median difference",
            f"{base} of {len(free)} = {100 * base / len(free):.1f} %",
        ),
    ]
    return table(f"Why here, {pair.label}: the first differing token", ["what", "count"], lines)


def _figure(name: str, pair: Pair, found: Sequence[Divergence], free: Sequence[float]) -> Figure:
    """Margin over drift, one mark per row and arm; the diagonal separates what the drift can turn from the rest."""
    points = [[(one.max_drift, m) for one in found if (m := one.margins[k]) is not None] for k in (0, 1)]
    flat = [point for arm in points for point in arm]
    middle = statistics.median(free)
    positive = [value for point in flat for value in point if value] + ([middle] if middle else [])
    ties = any(not margin for _, margin in flat)
    low, high = min(positive) / 2, max(positive) * 2
    floor = low / 3 if ties else low
    left = 34 + max(text_width(f"{value:g}", 11) for value in [*powers(floor, high), 0.001])
    plot = Plot(190, left, [(arm, look(index)) for index, arm in enumerate(pair.arms)])
    x, y = plot.x_scale(low, high, log=True), plot.y_scale(floor, high, log=True)
    plot.polygon([(x(low), y(low)), (x(high), y(high)), (x(high), plot.y1), (x(low), plot.y1)], "muted", 0.15)
    plot.line(x(low), y(low), x(high), y(high), "muted", 1.2, "5 3")
    plot.x_axis([(x(v), f"{v:g}") for v in powers(low, high)], "largest difference of the boundary logits", grid=True)
    ticks = [(y(v), f"{v:g}") for v in powers(low, high)] + ([(y(floor), "tie")] if ties else [])
    plot.y_axis(ticks, "margin at the divergence", grid=True)
    if middle:
        plot.line(plot.x0, y(middle), plot.x1, y(middle), "ink", 1.0, "2 3")
        plot.text(plot.x0 + 6, y(middle) + 14, "median of all free choices", size=11)
    for index, arm in enumerate(points):
        for drift, margin in arm:
            if drift:
                plot.mark(x(drift) + 3 * (2 * index - 1), y(margin or floor), look(index))
    caption = (
        f"{pair.label}: each arm's margin at the first divergence over the largest difference of the two boundary "
        "logits. In the shaded half the drift at the boundary is at least the margin. Ties are on the bottom line. The "
        "drift at the divergence itself is not recorded."
    )
    lines = [[one.row, number(one.max_drift), *map(_margin, one.margins)] for one in found]
    told = f"{sum(margin <= drift for drift, margin in flat)} of {len(flat)} marks lie in the shaded half."
    data = table("Margin and drift by row", ["row", "largest drift", *pair.arms], lines)
    return Figure(name, caption, f"Scatter of margin over drift on logarithmic axes. {told}", data, plot.svg())


def _margin(value: float | None) -> str:
    return "forced" if value is None else number(value)


def _table(pair: Pair, found: Sequence[Divergence]) -> Table:
    left, right = pair.arms
    header = ["row", "first differing token", f"margin, {left}", f"margin, {right}", f"ULP, {left}", f"ULP, {right}"]
    header += ["boundary drift, mean", "boundary drift, largest", "choices as close before"]
    lines = [
        [
            one.row,
            str(one.first),
            *map(_margin, one.margins),
            *(scalar(u) if u is not None else "not recorded" for u in one.ulps),
            number(one.mean_drift),
            number(one.max_drift),
            str(one.before),
        ]
        for one in found
    ]
    return table(f"Margins where suffixes part, {pair.label}", header, lines, folded=True)
