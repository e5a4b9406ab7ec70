"""Nested JSON as leaves, and two such values compared leaf by leaf: exact values, exact types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.run.ledger import canonical

SHOWN_CHARACTERS = 60
_ABSENT = object()


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Returns {path: value} of every leaf. A list of plain values is one leaf, and so is an empty object."""
    children: list[tuple[str, Any]]
    if isinstance(value, dict) and value:
        children = [(f"{at}.{key}" if at else str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, dict | list) for child in value):
        children = [(f"{at}[{index}]", child) for index, child in enumerate(value)]
    else:
        return {at: value}
    return {path: leaf for where, child in children for path, leaf in leaves(child, where).items()}


@dataclass(frozen=True)
class LeafDifference:
    """One leaf that is not equal on both sides."""

    path: str
    left: Any  # _ABSENT where only the right side has the leaf
    right: Any  # _ABSENT where only the left side has the leaf

    @property
    def one_sided(self) -> bool:
        return self.left is _ABSENT or self.right is _ABSENT

    def line(self, left: str, right: str) -> str:
        """Returns 'PATH: LEFT 1, RIGHT 2'. Two lists are shown by their lengths and the first entry that differs."""
        if isinstance(self.left, list) and isinstance(self.right, list):
            return f"{self.path}: {_list_line(self.left, self.right, left, right)}"
        return f"{self.path}: {left} {_short(self.left)}, {right} {_short(self.right)}"


@dataclass(frozen=True)
class LeafComparison:
    """Two nested values compared."""

    shared: int  # leaves that both sides have
    differing: tuple[LeafDifference, ...]  # shared leaves with other values or other types
    one_sided: tuple[LeafDifference, ...]  # leaves of one side alone

    @property
    def equal(self) -> bool:
        return not self.differing and not self.one_sided

    def lines(self, left: str, right: str) -> list[str]:
        """Returns one line per difference, the sides named `left` and `right`."""
        return [difference.line(left, right) for difference in (*self.differing, *self.one_sided)]


def compare_leaves(left: Any, right: Any, at: str = "") -> LeafComparison:
    """Compares leaf by leaf. Equal means the same canonical JSON: 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    mine, theirs = leaves(left, at), leaves(right, at)
    pairs = [(path, mine.get(path, _ABSENT), theirs.get(path, _ABSENT)) for path in {**mine, **theirs}]
    unequal = [LeafDifference(*pair) for pair in pairs if not _same(pair[1], pair[2])]
    one_sided = tuple(one for one in unequal if one.one_sided)
    differing = tuple(one for one in unequal if not one.one_sided)
    return LeafComparison(len(mine.keys() & theirs.keys()), differing, one_sided)


def without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Returns an object without some of its keys."""
    return {key: inner for key, inner in value.items() if key not in keys}


def first_unequal(left: list[Any], right: list[Any]) -> int | None:
    """Returns the first index at which two lists differ: the shorter one's length where it is the other's start."""
    for index, (mine, theirs) in enumerate(zip(left, right)):
        if not _same(mine, theirs):
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _same(left: Any, right: Any) -> bool:
    if left is _ABSENT or right is _ABSENT:
        return False
    return canonical(left) == canonical(right)


def _list_line(mine: list[Any], theirs: list[Any], left: str, right: str) -> str:
    lengths = f"{left} {len(mine)} entries, {right} {len(theirs)}"
    index = first_unequal(mine, theirs)
    if index is None or index >= min(len(mine), len(theirs)):
        return lengths
    return f"{lengths}; entry {index}: {left} {_short(mine[index])}, {right} {_short(theirs[index])}"


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = canonical(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
