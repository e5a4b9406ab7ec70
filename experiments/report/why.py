"""Why here? The margin at each first divergence against the drift of the boundary logits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.report.blocks import Block, Figure, Table, table
from experiments.report.charts import LIGHT, chart, decades, legend, log_scale, look
from experiments.report.runs import Pair
from experiments.report.values import number, scalar
from stats.margins import margin_ulps

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    margins = [at(arm.get("margins", []), first) for arm in arms]
    ulps = [margin_ulps(margin, top, dtype) for margin, top in zip(margins, tops)]
    left, right = (at(arm["suffix"], first) for arm in arms)
    drift = pair["logits"]
    mean, largest = drift["mean_abs"], drift["max_abs"]
    before = sum(margin is not None and margin <= largest for margin in arms[0].get("margins", [])[:first])
    return Divergence(key, first, (left, right), (margins[0], margins[1]), (ulps[0], ulps[1]), mean, largest, before)


def at(values: Sequence[Any], index: int) -> Any:
    """The value at an index; None beyond the end."""
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
    return [_statement(pair, known, free), _figure(name, pair, found, free)]


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
    low, high = decades([drift for drift, _ in flat])

    def draw(axes: "Axes") -> None:
        log_scale(axes, [*(margin for _, margin in flat), middle or 1.0], "tie")
        axes.set(xscale="log", xlim=(low, high), xlabel="largest difference of the boundary logits")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(axis="both")
        axes.set_ylabel("margin at the divergence")
        axes.fill_between([low, high], [low, high], axes.get_ylim()[0], color=LIGHT["muted"], alpha=0.15)
        axes.plot([low, high], [low, high], color=LIGHT["muted"], linewidth=1.2, linestyle="--")
        if middle:
            axes.axhline(middle, color=LIGHT["ink"], linewidth=1, linestyle=":", label="median of all free choices")
        for index, arm in enumerate(points):
            drifts, margins = zip(*((d, m) for d, m in arm if d)) if any(d for d, _ in arm) else ((), ())
            axes.plot(drifts, margins, linestyle="none", label=pair.arms[index], fillstyle=("full", "none")[index],
                      **look(index))  # fmt: skip
        legend(axes)

    caption = (
        f"{pair.label}: each arm's margin at the first divergence over the largest difference of the two boundary "
        "logits. In the shaded half the drift at the boundary is at least the margin. Ties are on the bottom line. The "
        "drift at the divergence itself is not recorded."
    )
    told = f"{sum(margin <= drift for drift, margin in flat)} of {len(flat)} marks lie in the shaded half."
    return chart(
        name, 3.6, draw, caption, f"Scatter of margin over drift on logarithmic axes. {told}", _table(pair, found)
    )


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
    return table(f"Margins where suffixes part, {pair.label}", header, lines)
