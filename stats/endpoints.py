"""The experiments' endpoints as summary blocks: disagreement, accuracy, first divergence, cross-precision reductions.

Every function takes one entry per row, in row order. Source: the paper's design sections for experiments 1 and 2; the
blocks reproduce the published claims to the last bit.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stats.errors import StatsInputError
from stats.intervals import SEED, Z_MATRIX, Bootstrap, Proportion, mcnemar_exact, paired_bootstrap, wilson


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first token in which two suffixes differ, or None where they are equal.

    If one suffix is a prefix of the other, that is the shorter one's length.
    """
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def disagreement(equal: Sequence[bool], z: float = Z_MATRIX) -> Proportion:
    """Return the share of rows that are not `equal`."""
    return wilson(sum(not flag for flag in equal), len(equal), z)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of `n` values; None where n is 0."""

    n: int
    median: float | None
    min: float | None
    max: float | None

    def as_dict(self) -> dict[str, object]:
        return {"n": self.n, "median": self.median, "min": self.min, "max": self.max}


def divergence_spread(indices: Sequence[int | None]) -> Spread:
    """Return the spread of the first-divergence indices over the rows that diverge (None: equal suffixes)."""
    found = [float(index) for index in indices if index is not None]
    if not found:
        return Spread(0, None, None, None)
    return Spread(len(found), statistics.median(found), min(found), max(found))


@dataclass(frozen=True)
class PairedComparison:
    """Two yes/no labels per row, counted, and their paired difference right - left in points."""

    n: int
    left: int  # rows where the left label is yes
    right: int
    left_only: int  # rows where only the left label is yes
    right_only: int
    bootstrap: Bootstrap
    mcnemar_p: float

    @property
    def difference_points(self) -> float | None:
        return self.bootstrap.difference

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form: difference_points (right - left), its interval, left_only, right_only, mcnemar_p."""
        return {
            **self.bootstrap.effect_dict(),
            "left_only": self.left_only,
            "right_only": self.right_only,
            "mcnemar_p": self.mcnemar_p,
        }

    def accuracy_dict(self, left_arm: str, right_arm: str) -> dict[str, object]:
        """Return the summary's `accuracy` block: {ARM: {correct, n}, difference_points (right - left), ...}."""
        return {
            left_arm: {"correct": self.left, "n": self.n},
            right_arm: {"correct": self.right, "n": self.n},
            **self.as_dict(),
        }

    def reduction_dict(self, left: str = "bf16", right: str = "fp32") -> dict[str, object]:
        """Return a cross-precision block: {bf16_count, fp32_count, ..., difference_points (fp32 - bf16), ...}."""
        return {
            "n": self.n,
            f"{left}_count": self.left,
            f"{right}_count": self.right,
            f"{left}_only": self.left_only,
            f"{right}_only": self.right_only,
            **self.bootstrap.effect_dict(),
            "mcnemar_p": self.mcnemar_p,
        }


def compare_labels(left: Sequence[bool], right: Sequence[bool], stream: int, *, seed: int = SEED) -> PairedComparison:
    """Compare two labels of the same rows: correctness of two arms, or disagreement in two precisions.

    `stream` is one of `stats.intervals.STREAMS`. Raises StatsInputError where the two differ in length.
    """
    _same_length(left, right)
    differences = [int(b) - int(a) for a, b in zip(left, right, strict=True)]
    left_only, right_only = differences.count(-1), differences.count(1)
    return PairedComparison(
        n=len(differences),
        left=sum(map(bool, left)),
        right=sum(map(bool, right)),
        left_only=left_only,
        right_only=right_only,
        bootstrap=paired_bootstrap(differences, seed, stream),
        mcnemar_p=mcnemar_exact(left_only, right_only),
    )


def difference_of_differences(
    bf16: tuple[Sequence[bool], Sequence[bool]],
    fp32: tuple[Sequence[bool], Sequence[bool]],
    stream: int,
    *,
    seed: int = SEED,
) -> Bootstrap:
    """Return how the accuracy effect changes with precision: (right - left) in FP32 minus that in BF16, paired by row.

    Each argument holds the correctness labels of the left and the right arm in one precision.
    """
    for labels in (bf16[1], fp32[0], fp32[1]):
        _same_length(bf16[0], labels)
    effects = [[int(right) - int(left) for left, right in zip(*arms, strict=True)] for arms in (bf16, fp32)]
    return paired_bootstrap([high - low for low, high in zip(*effects, strict=True)], seed, stream)


def _same_length(left: Sequence[object], right: Sequence[object]) -> None:
    if len(left) != len(right):
        raise StatsInputError(f"paired comparison: expected equally many rows, found {len(left)} and {len(right)}")
