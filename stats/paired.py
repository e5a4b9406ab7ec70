"""Paired statistics of two per-item result sets, joined by id and never by order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stats.endpoints import PairedComparison, compare_labels
from stats.errors import StatsInputError
from stats.intervals import SEED, Z_MATRIX, Proportion, wilson

_NAMED = 5


@dataclass(frozen=True)
class PairedResult:
    """Both accuracies, the paired comparison (right - left), and the ids on which only one side is correct, sorted."""

    left: Proportion
    right: Proportion
    comparison: PairedComparison
    left_only_ids: tuple[str, ...]
    right_only_ids: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form; `left` and `right` are {count, n, rate, wilson_95}."""
        return {
            "n": self.comparison.n,
            "left": self.left.as_dict(),
            "right": self.right.as_dict(),
            **self.comparison.as_dict(),
            "left_only_ids": list(self.left_only_ids),
            "right_only_ids": list(self.right_only_ids),
        }


def unique_labels(items: Iterable[tuple[str, bool]], where: str) -> dict[str, bool]:
    """Return {id: correct} of one result set. Raises StatsInputError, naming `where`, for a repeated id."""
    labels: dict[str, bool] = {}
    for item_id, correct in items:
        if item_id in labels:
            raise StatsInputError(f"{where}: expected each id once, found {item_id!r} again")
        labels[item_id] = correct
    return labels


def compare_results(
    left: Mapping[str, bool], right: Mapping[str, bool], *, seed: int = SEED, stream: int = 0, z: float = Z_MATRIX
) -> PairedResult:
    """Compare two result sets {id: correct}, in the order of their ids: the order of the files changes nothing.

    Raises StatsInputError where the id sets differ or are empty.
    """
    _refuse_unequal_ids(left, right)
    ids = sorted(left)
    left_labels, right_labels = [left[i] for i in ids], [right[i] for i in ids]
    comparison = compare_labels(left_labels, right_labels, stream, seed=seed)
    return PairedResult(
        left=wilson(comparison.left, comparison.n, z),
        right=wilson(comparison.right, comparison.n, z),
        comparison=comparison,
        left_only_ids=tuple(i for i in ids if left[i] and not right[i]),
        right_only_ids=tuple(i for i in ids if right[i] and not left[i]),
    )


def _refuse_unequal_ids(left: Mapping[str, bool], right: Mapping[str, bool]) -> None:
    if not left and not right:
        raise StatsInputError("paired results: expected at least one item, found none")
    missing = [
        f"{len(only)} only {side} ({', '.join(map(repr, sorted(only)[:_NAMED]))}{' ...' if len(only) > _NAMED else ''})"
        for side, only in (("left", left.keys() - right.keys()), ("right", right.keys() - left.keys()))
        if only
    ]
    if missing:
        raise StatsInputError(f"paired results: expected the same ids on both sides, found {' and '.join(missing)}")
