"""The experiments' endpoints as summary blocks: disagreement, accuracy, first divergence, cross-precision reductions.

Every function takes one entry per row, in row order. Source: the paper's design sections for experiments 1 and 2; the
blocks reproduce the published claims to the last bit.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stats.errors import StatsInputError
from stats.intervals import SEED, Z_MATRIX, Bootstrap, Proportion, mcnemar_exact, paired_bootstrap, wilson

_NAMED = 5  # ids that a refusal names


def first_divergence(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Returns the index of the first entry in which two sequences differ, or None where they are equal.

    If one is a prefix of the other, that is the shorter one's length.
    """
    end = None if len(left) == len(right) else min(len(left), len(right))
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), end)


def disagreement(equal: Sequence[bool], z: float = Z_MATRIX) -> Proportion:
    """Returns the share of rows that are not `equal`."""
    return wilson(sum(not flag for flag in equal), len(equal), z)


def divergence_spread(indices: Sequence[int | None]) -> dict[str, object]:
    """Returns {n, median, min, max} of the first-divergence indices of the rows that diverge; None without such a row.

    indices: one per row, None where the suffixes are equal.
    """
    found = [float(index) for index in indices if index is not None]
    if not found:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {"n": len(found), "median": statistics.median(found), "min": min(found), "max": max(found)}


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

    def as_dict(self) -> dict[str, object]:
        """Returns difference_points (right - left), its interval and note, left_only, right_only, mcnemar_p."""
        only = {"left_only": self.left_only, "right_only": self.right_only}
        return {**self.bootstrap.as_dict(), **only, "mcnemar_p": self.mcnemar_p}

    def accuracy_dict(self, left: str, right: str) -> dict[str, object]:
        """Returns the summary's `accuracy` block, for the arms `left` and `right`: {ARM: {correct, n}, ...}."""
        counts = {left: self.left, right: self.right}
        return {**{arm: {"correct": count, "n": self.n} for arm, count in counts.items()}, **self.as_dict()}

    def reduction_dict(self, left: str, right: str) -> dict[str, object]:
        """Returns a cross-precision block, for two dtypes: {n, bf16_count, fp32_count, bf16_only, fp32_only, ...}."""
        counts = {f"{left}_count": self.left, f"{right}_count": self.right}
        only = {f"{left}_only": self.left_only, f"{right}_only": self.right_only}
        return {"n": self.n, **counts, **only, **self.bootstrap.as_dict(), "mcnemar_p": self.mcnemar_p}


def compare_labels(left: Sequence[bool], right: Sequence[bool], stream: int, seed: int = SEED) -> PairedComparison:
    """Compares two labels of the same rows: correctness of two arms, or disagreement in two precisions.

    `stream` is one of `stats.intervals.STREAMS`.
    """
    differences = _differences(left, right)
    left_only, right_only = differences.count(-1), differences.count(1)
    bootstrap, p = paired_bootstrap(differences, seed, stream), mcnemar_exact(left_only, right_only)
    return PairedComparison(len(differences), sum(left), sum(right), left_only, right_only, bootstrap, p)


def compare_results(left: Mapping[str, bool], right: Mapping[str, bool], *, seed: int = SEED) -> dict[str, Any]:
    """Compares two result sets {id: correct}, joined by id: the order of the files changes nothing.

    Returns n, both accuracies, `PairedComparison.as_dict`, and the ids on which only one side is correct, sorted.
    Raises StatsInputError where the id sets differ or are empty.
    """
    if not left and not right:
        raise StatsInputError("paired results: expected at least one item, found none")
    missing = [
        f"{len(only)} only {side} ({', '.join(map(repr, sorted(only)[:_NAMED]))}{' ...' if len(only) > _NAMED else ''})"
        for side, only in (("left", left.keys() - right.keys()), ("right", right.keys() - left.keys()))
        if only
    ]
    if missing:
        raise StatsInputError(f"paired results: expected the same ids on both sides, found {' and '.join(missing)}")
    ids = sorted(left)
    comparison = compare_labels([left[i] for i in ids], [right[i] for i in ids], 0, seed=seed)
    return {
        "n": comparison.n,
        "left": wilson(comparison.left, comparison.n).as_dict(),
        "right": wilson(comparison.right, comparison.n).as_dict(),
        **comparison.as_dict(),
        "left_only_ids": [i for i in ids if left[i] and not right[i]],
        "right_only_ids": [i for i in ids if right[i] and not left[i]],
    }


def difference_of_differences(
    bf16: tuple[Sequence[bool], Sequence[bool]], fp32: tuple[Sequence[bool], Sequence[bool]], stream: int
) -> Bootstrap:
    """Returns how the accuracy effect changes with precision: (right - left) in FP32 minus that in BF16, paired by row.

    Each argument holds the correctness labels of the left and the right arm in one precision.
    """
    return paired_bootstrap(_differences(_differences(*bf16), _differences(*fp32)), SEED, stream)


def _differences(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [int(b) - int(a) for a, b in zip(left, right, strict=True)]
