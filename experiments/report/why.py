"""Why here? The margin at each first divergence against the drift of the boundary logits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.blocks import Block, Figure, Paragraph, table
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
    return Divergence(
        key, first, (left, right), (margins[0], margins[1]), (ulps[0], ulps[1]), drift["mean_abs"], drift["max_abs"]
    )


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def why_blocks(name: str, pair: Pair) -> list[Block]:
    """The statement, the drawing and the table of one comparison; empty where nothing diverges."""
    left, _ = pair.arms
    found = [one for one in (divergence(row, key, pair.name, pair.dtype) for key, row in pair.rows) if one is not None]
    free = [m for _, row in pair.rows for m in row["arms"][left].get("margins", []) if m is not None]
    known = [one for one in found if one.margin is not None]
    if not known or not free:
        return []
    return [Paragraph(_statement(pair, known, free)), _figure(name, pair, known, free), _table(pair, found)]


def _statement(pair: Pair, found: Sequence[Divergence], free: Sequence[float]) -> str:
    """How many first divergences lie within the drift of the row's own boundary logits, beside the base rate."""
    within = sum(one.margin is not None and one.margin <= one.max_drift for one in found)
    typical = statistics.median(one.max_drift for one in found)
    base = sum(margin <= typical for margin in free)
    ulps = [one.ulp for one in found if one.ulp is not None]
    near = f" {sum(u <= 1 for u in ulps)} of {len(ulps)} lie within 1 ULP of the best logit." if ulps else ""
    return (
        f"Why here, {pair.label}: in {within} of {len(found)} divergent rows the smaller margin at the first differing "
        f"token is at most the largest difference of that row's two boundary logits (median {number(typical)}).{near} "
        f"For comparison, {base} of all {len(free)} free choices of {pair.arms[0]} "
        f"({100 * base / len(free):.1f} %) have a margin that small. The drift is measured at the boundary; at the "
        "divergence itself it is not recorded."
    )


def _figure(name: str, pair: Pair, found: Sequence[Divergence], free: Sequence[float]) -> Figure:
    """Margin over drift, one mark per row; the diagonal separates what the drift can turn from what it cannot."""
    points = [(one.max_drift, one.margin) for one in found if one.margin is not None]
    middle = statistics.median(free)
    positive = [v for point in points for v in point if v] + ([middle] if middle else [])
    exact = any(not margin for _, margin in points)
    low, high = min(positive) / 2, max(positive) * 2
    floor = low / 3 if exact else low
    labels = [f"{value:g}" for value in powers(floor, high)]
    left = 34 + max(text_width(label, 11) for label in [*labels, "tie"])
    plot = Plot(190, left, [("a divergent row", look(1))])
    x, y = plot.x_scale(low, high, log=True), plot.y_scale(floor, high, log=True)
    plot.polygon([(x(low), y(low)), (x(high), y(high)), (x(high), plot.y1), (x(low), plot.y1)], "first", 0.12)
    plot.line(x(low), y(low), x(high), y(high), "first", 1.2, "5 3")
    plot.x_axis([(x(v), f"{v:g}") for v in powers(low, high)], "largest difference of the boundary logits", grid=True)
    ticks = [(y(v), f"{v:g}") for v in powers(low, high)] + ([(y(floor), "tie")] if exact else [])
    plot.y_axis(ticks, "margin at the divergence", grid=True)
    if middle:
        plot.line(plot.x0, y(middle), plot.x1, y(middle), "muted", 1.2, "2 3")
        plot.text(plot.x1, y(middle) - 4, "median margin of all free choices", "end", 11, "muted")
    for drift, margin in points:
        if drift:
            plot.mark(x(drift), y(margin or floor), look(1))
    caption = (
        f"{pair.label}: the smaller margin at the first divergence over the largest difference of the two boundary "
        "logits. In the shaded half the drift alone is as large as the margin. Ties are drawn on the bottom line."
    )
    lines = [[one.row, number(one.max_drift), number(one.margin)] for one in found]
    told = f"{sum(m <= d for d, m in points)} of {len(points)} marks lie in the shaded half."
    data = table("Margin and drift by row", ["row", "largest drift", "smaller margin"], lines)
    return Figure(name, caption, f"Scatter of margin over drift on logarithmic axes. {told}", data, plot.svg())


def _table(pair: Pair, found: Sequence[Divergence]) -> Block:
    left, right = pair.arms
    header = ["row", "first differing token", f"margin, {left}", f"margin, {right}", f"ULP, {left}", f"ULP, {right}"]
    header += ["boundary drift, mean", "boundary drift, largest"]
    lines = [
        [
            one.row,
            str(one.first),
            *(number(m) if m is not None else "forced" for m in one.margins),
            *(scalar(u) if u is not None else "not recorded" for u in one.ulps),
            number(one.mean_drift),
            number(one.max_drift),
        ]
        for one in found
    ]
    return table(f"Margins where suffixes part, {pair.label}", header, lines, folded=True)
