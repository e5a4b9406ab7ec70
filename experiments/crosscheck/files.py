"""Two boundary files or two trace files, ours or a recorder's: the first differing step in forward order."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from cache.boundary import SCHEMA as BOUNDARY
from cache.storage import Stored, open_tensors
from experiments.crosscheck.tensors import Difference, first_difference
from experiments.run.leaves import compare_leaves
from experiments.run.saving import SCHEMA as TRACE
from experiments.run.saving import token_axis
from minimodel.errors import InputError, refuse

PER_TOKEN = "one a token"
CACHED = re.compile(r"layers\.(\d+)\.(key|value)")


class Named(Protocol):
    """Tensors by name, read when asked for: a stored file, or a rerun in memory."""

    @property
    def names(self) -> list[str]: ...
    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class InMemory:
    """Named tensors that are already there."""

    held: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        return list(self.held)

    def tensor(self, name: str) -> Tensor:
        return self.held[name]


@dataclass(frozen=True)
class FilePair:
    """What two files of one kind say of each other. `first` None and `functional_equal`: equal in every bit."""

    kind: str
    construction: tuple[str, str]
    environment: list[str]
    functional_equal: bool
    only_left: list[str]
    only_right: list[str]
    first: Difference | None
    steps: int
    differing_steps: int

    @property
    def equal(self) -> bool:
        return self.first is None and self.functional_equal and not self.only_left and not self.only_right


def compare_files(left: Path, right: Path) -> tuple[FilePair, Stored, Stored]:
    """Opens and compares. InputError unless both are of one kind, checkpoint, contract, dtype and token list."""
    mine, theirs = (open_tensors(path, (BOUNDARY, TRACE)) for path in (left, right))
    require_comparable(mine, theirs)
    kind = "boundary" if mine.header["schema"] == BOUNDARY else "trace"
    stop, by_slot = len(mine.header["tokens"]), all(side.header.get("calls") == PER_TOKEN for side in (mine, theirs))
    first, differing, shared = first_step(mine, theirs, stop, by_slot)
    return (
        FilePair(
            kind,
            (mine.header["construction"], theirs.header["construction"]),
            environment_differences(mine.header, theirs.header),
            mine.header["functional_sha256"] == theirs.header["functional_sha256"],
            [name for name in mine.names if name not in theirs.entries],
            [name for name in theirs.names if name not in mine.entries],
            first,
            shared,
            differing,
        ),
        mine,
        theirs,
    )


def require_comparable(left: Stored, right: Stored) -> None:
    """InputError for files that cannot be held against each other."""
    mine, theirs = left.header, right.header
    for key in ("schema", "checkpoint", "contract", "tokens"):
        if mine[key] != theirs[key]:
            lines = compare_leaves(mine[key], theirs[key], key).lines("expected", "found")
            found = "; ".join(lines[:2]) if key != "tokens" else "others"
            raise InputError(f"{right.path}: expected the {key} of {left.path}, found {found}")
    if mine["numeric"].get("dtype") != theirs["numeric"].get("dtype"):
        raise refuse(f"{right.path}: dtype", repr(mine["numeric"].get("dtype")), theirs["numeric"].get("dtype"))


def environment_differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns one line per difference of the two computations, their results apart."""
    parts = ("source", "numeric", "environment")
    return compare_leaves({k: mine.get(k) for k in parts}, {k: theirs.get(k) for k in parts}).lines("A", "B")


def first_step(left: Named, right: Named, stop: int, by_slot: bool) -> tuple[Difference | None, int, int]:
    """(the first difference, steps that differ, steps on both sides).

    Forward order is step by step when a call held all slots, and slot by slot, then step by step, when each token had
    a call of its own (`by_slot`). Everything that the named element was computed from is equal on both sides, as far as
    it is on both sides.
    """
    head_dim = head_size(left)
    names = [name for name in left.names if name in right.names]
    if not names:
        raise InputError("steps: expected at least one of the same name on both sides, found none")
    best: Difference | None = None
    differing = 0
    for name in names:
        mine, theirs = _same_window(left.tensor(name), right.tensor(name))
        found = first_difference(name, mine, theirs, stop, head_dim)
        differing += found is not None
        if found is not None and (best is None or (by_slot and found.position < best.position)):
            best = found
    return best, differing, len(names)


def _same_window(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The last token slots that both hold: one trace may have kept fewer than the other."""
    if left.ndim != right.ndim or left.ndim < 3:
        return left, right
    axis = token_axis(left)
    kept = min(left.shape[axis], right.shape[axis])
    return tuple(t.narrow(axis, t.shape[axis] - kept, kept) for t in (left, right))  # type: ignore[return-value]


def head_size(side: Named) -> int | None:
    """D, read off the first rotated or cached key; None where there is none."""
    for name in side.names:
        if name.endswith("k_rotary") or CACHED.fullmatch(name):
            return side.tensor(name).shape[-1]
    return None


def common_prefix_step(left: Path, right: Path, length: int) -> Difference | None:
    """The first differing step of two token-by-token traces before slot `length`; None where they kept fewer slots.

    For live traces whose tokens part at `length`: up to there they are comparable.
    """
    sides = []
    for path in (left, right):
        stored = open_tensors(path, TRACE)
        total = len(stored.header["tokens"])
        axes = {name: 2 if len(entry.shape) == 4 else 1 for name, entry in stored.entries.items()}
        whole = [name for name in stored.names if stored.entries[name].shape[axes[name]] == total]
        if stored.header.get("calls") != PER_TOKEN or not whole:
            return None
        sides.append(InMemory({name: stored.tensor(name).narrow(axes[name], 0, length) for name in whole}))
    return first_step(sides[0], sides[1], length, by_slot=True)[0]
