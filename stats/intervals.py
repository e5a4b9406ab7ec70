"""Wilson intervals, the exact McNemar test and the paired percentile bootstrap.

Sources: the paper's statistics section and the frozen plan of its release ("uncertainty" in analysis_plan.json).
They reproduce every published digit to the last bit, which needs the order of operations that stands here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stats.errors import StatsInputError

Z_MATRIX = 1.96  # normal quantile of the matrix experiments' Wilson intervals (the plan's `matrix_wilson_z`)
Z_TRANSPLANT = 1.959963984540054  # of the transplants' (the plan's `transplant_wilson_z`)
SEED = 20260728  # of the bootstrap (the plan's `bootstrap_seed`)
# offset added to the seed, by endpoint, so that endpoints draw independently (the plan's `bootstrap_streams`)
STREAMS: dict[str, int] = {
    "matched_bf16": 0,
    "matched_fp32": 1,
    "cross_suffix": 20,
    "cross_answer": 21,
    "cross_correctness": 22,
    "cross_logits": 23,
    "accuracy_difference_of_differences": 30,
    "fixed_bf16": 100,
    "fixed_fp32": 101,
}
REPLICATES = 20_000
BLOCK = 1_000
# the frozen plan's `uncertainty`, key for key
UNCERTAINTY: dict[str, object] = {
    "accuracy": f"{REPLICATES:,} paired-problem percentile bootstrap replicates",
    "binary_rates": "Wilson 95% intervals",
    "bootstrap_seed": SEED,
    "bootstrap_streams": STREAMS,
    "directional_side_read": "exact two-sided McNemar test",
    "matrix_wilson_z": Z_MATRIX,
    "transplant_wilson_z": Z_TRANSPLANT,
}
# Bootstrap.note: how a report says that there is no interval
NO_INTERVAL = {
    "degenerate": "no interval: every row has the same difference",
    "too few": "no interval: fewer than two rows",
}
_DRAWS_AT_ONCE = 4_000_000  # integers in memory


@dataclass(frozen=True)
class Proportion:
    """`count` of `n` rows, with the Wilson bounds `low` and `high`; both are None where there is no row."""

    count: int
    n: int
    low: float | None
    high: float | None

    @property
    def rate(self) -> float | None:
        """count / n; None where n is 0."""
        return self.count / self.n if self.n else None

    def as_dict(self) -> dict[str, object]:
        """Returns the JSON form: count, n, rate, wilson_95 (`null` rate and interval where n is 0)."""
        interval = None if self.low is None else [self.low, self.high]
        return {"count": self.count, "n": self.n, "rate": self.rate, "wilson_95": interval}


def wilson(count: int, n: int, z: float = Z_MATRIX) -> Proportion:
    """Returns the Wilson score interval of `count` successes in `n` trials at the normal quantile `z`.

    Raises StatsInputError where count is outside 0..n or n is negative. With n = 0 there is no interval. The bounds at
    count 0 and count n are exactly 0 and 1.

    The same interval is `scipy.stats.binomtest(count, n).proportion_ci(c, "wilson")`, to about one unit in the last
    place; it is written out because scipy takes a confidence level c and recovers z as ndtri((1 + c) / 2), and no
    double c gives exactly z = 1.96 back: near 0.975 neighbouring doubles are 2e-15 apart in z. A test compares the two.
    """
    if n < 0 or not 0 <= count <= n:
        raise StatsInputError(f"Wilson interval: expected 0 <= count <= n, found count {count}, n {n}")
    if n == 0:
        return Proportion(0, 0, None, None)
    p = count / n
    denominator = 1.0 + z * z / n
    center = (p + z * z / (2 * n)) / denominator
    half_width = z * math.sqrt(p * (1.0 - p) / n + z * z / (4 * n * n)) / denominator
    low = 0.0 if count == 0 else max(0.0, center - half_width)
    high = 1.0 if count == n else min(1.0, center + half_width)
    return Proportion(count, n, low, high)


def mcnemar_exact(left_only: int, right_only: int) -> float:
    """Returns the two-sided exact McNemar p: a binomial test of the discordant pairs at 1/2; 1.0 without any.

    `left_only` and `right_only` count the pairs in which only that side is a success.
    """
    if left_only + right_only == 0:
        return 1.0
    from scipy.stats import binomtest  # here, as it takes half as long to import as torch, and few commands come here

    return float(binomtest(left_only, left_only + right_only, 0.5).pvalue)


@dataclass(frozen=True)
class Bootstrap:
    """Percentile interval of a mean paired difference, in percentage points."""

    n: int
    difference: float | None  # the mean x 100; None where n is 0
    interval: list[float] | None  # [low, high]; None where n < 2
    note: str | None  # "degenerate": all differences are equal and the interval is a point; "too few": n < 2

    def as_dict(self) -> dict[str, object]:
        """Returns the JSON form without n: difference_points, bootstrap_95 and bootstrap_note; never NaN."""
        return {"difference_points": self.difference, "bootstrap_95": self.interval, "bootstrap_note": self.note}


def paired_bootstrap(differences: Sequence[int], seed: int = SEED, stream: int = 0) -> Bootstrap:
    """Returns the paired percentile bootstrap of the mean of `differences` [n]: bounds at 2.5 and 97.5 %, in points.

    The generator is `numpy.random.default_rng(seed + stream)`, local to the call. A replicate is the next n integers
    that it draws, so the same differences in the same order give the same bits, however many replicates are drawn at
    once: at most `BLOCK`, fewer for a large n, which bounds memory.
    """
    values, n = np.asarray(differences, dtype=np.float64), len(differences)
    difference = float(values.mean()) * 100.0 if n else None
    if n < 2:
        return Bootstrap(n, difference, None, "too few")
    generator, rows, means = np.random.default_rng(seed + stream), max(1, min(BLOCK, _DRAWS_AT_ONCE // n)), []
    for start in range(0, REPLICATES, rows):
        drawn = generator.integers(0, n, size=(min(rows, REPLICATES - start), n))
        means.append(values[drawn].mean(axis=1))
    interval = [float(q) for q in np.quantile(np.concatenate(means) * 100.0, [0.025, 0.975])]
    return Bootstrap(n, difference, interval, "degenerate" if bool((values == values[0]).all()) else None)
