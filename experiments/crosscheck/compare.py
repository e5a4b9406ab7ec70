"""Compares two boundary or trace files, or two runs: whether they are comparable, what differs, and where first."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cache.boundary import SCHEMA as BOUNDARY
from cache.storage import Stored, open_tensors
from experiments.crosscheck.tensors import Difference, first_difference
from experiments.run.directory import Run
from experiments.run.ledger import LeafComparison, compare_leaves, without
from experiments.run.saving import SCHEMA as TRACE
from experiments.run.saving import token_axis
from minimodel.errors import InputError, refuse

PER_TOKEN = "one a token"
CACHED = re.compile(r"layers\.(\d+)\.(key|value)")
SAME_IN_FILES = ("schema", "checkpoint", "contract", "tokens")  # of the header: otherwise not comparable
SAME_IN_RUNS = ("experiment", "checkpoint", "caps", "visibility", "role_offset")  # of the manifest
NOTED = ("tasks_sha256", "code_sha256", "environment", "schema")
SEAL = "row_sha256"
Side = tuple[Sequence[str], Callable[[str], Tensor]]  # names in forward order, and how to read the tensor of a name


@dataclass(frozen=True)
class FilePair:
    """Two files of one kind, compared."""

    left: Stored
    right: Stored
    first: Difference | None  # the first differing step; None where all shared tensors are equal
    steps: int  # tensors on both sides
    differing_steps: int

    @property
    def kind(self) -> str:
        return "boundary" if self.left.header["schema"] == BOUNDARY else "trace"

    @property
    def functional_equal(self) -> bool:
        """Whether roles, positions and mask rows are equal."""
        return bool(self.left.header["functional_sha256"] == self.right.header["functional_sha256"])

    @property
    def only(self) -> dict[str, list[str]]:
        """Returns the names on one side alone, under A and B."""
        sides = {"A": (self.left, self.right), "B": (self.right, self.left)}
        return {letter: [n for n in one.names if n not in other.entries] for letter, (one, other) in sides.items()}

    @property
    def equal(self) -> bool:
        return self.first is None and self.functional_equal and not any(self.only.values())


def compare_files(left: Path, right: Path) -> FilePair:
    """Opens and compares two files. InputError unless kind, checkpoint, contract, dtype and token list are equal."""
    mine, theirs = (open_tensors(path, (BOUNDARY, TRACE)) for path in (left, right))
    _require_same(SAME_IN_FILES, (left, mine.header), (right, theirs.header))
    dtypes = [side.header["numeric"].get("dtype") for side in (mine, theirs)]
    if dtypes[0] != dtypes[1]:
        raise refuse(f"{right}: dtype", repr(dtypes[0]), dtypes[1])
    stop, by_slot = len(mine.header["tokens"]), all(side.header.get("calls") == PER_TOKEN for side in (mine, theirs))
    first, differing, shared = first_step((mine.names, mine.tensor), (theirs.names, theirs.tensor), stop, by_slot)
    return FilePair(mine, theirs, first, shared, differing)


def _require_same(
    keys: Sequence[str], left: tuple[Path, Mapping[str, Any]], right: tuple[Path, Mapping[str, Any]]
) -> None:
    """InputError, naming the first differing leaves, unless both objects have the same values under `keys`."""
    for key in keys:
        mine, theirs = left[1].get(key), right[1].get(key)
        if mine != theirs:
            lines = compare_leaves(mine, theirs, key).lines("expected", "found")
            found = "others" if key == "tokens" else "; ".join(lines[:2])
            raise InputError(f"{right[0]}: expected the {key} of {left[0]}, found {found}")


def environment_differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns one line per difference of source, numerics and environment."""
    parts = ("source", "numeric", "environment")
    return compare_leaves({k: mine.get(k) for k in parts}, {k: theirs.get(k) for k in parts}).lines("A", "B")


def first_step(left: Side, right: Side, stop: int, by_slot: bool) -> tuple[Difference | None, int, int]:
    """Returns the first difference, how many steps differ, and how many both sides have.

    Forward order is step by step where one call held all slots, and slot by slot, then step by step, where each token
    had a call of its own (`by_slot`). So what the named element was computed from is equal on both sides, as far as
    both have it.
    """
    names = [name for name in left[0] if name in right[0]]
    if not names:
        raise InputError("steps: expected at least one of the same name on both sides, found none")
    head_dim = head_size(left)
    best: Difference | None = None
    differing = 0
    for name in names:
        found = first_difference(name, *_same_window(left[1](name), right[1](name)), stop, head_dim)
        differing += found is not None
        if found is not None and (best is None or (by_slot and found.position < best.position)):
            best = found
    return best, differing, len(names)


def _same_window(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the last token slots that both hold: one trace may have kept fewer than the other."""
    if left.ndim != right.ndim or left.ndim < 3:
        return left, right
    axis = token_axis(left)
    kept = min(left.shape[axis], right.shape[axis])
    return left.narrow(axis, left.shape[axis] - kept, kept), right.narrow(axis, right.shape[axis] - kept, kept)


def head_size(side: Side) -> int | None:
    """Returns D, from the first rotated or cached key; None where there is none."""
    keys = (name for name in side[0] if name.endswith("k_rotary") or CACHED.fullmatch(name))
    return next((side[1](name).shape[-1] for name in keys), None)


def common_prefix_step(left: Path, right: Path, length: int) -> Difference | None:
    """Returns the first differing step of two token-by-token traces before slot `length`, where their tokens part;
    None where a trace kept fewer slots than it has tokens."""
    sides: list[dict[str, Tensor]] = []
    for path in (left, right):
        stored = open_tensors(path, TRACE)
        total = len(stored.header["tokens"])
        axes = {name: 2 if len(entry.shape) == 4 else 1 for name, entry in stored.entries.items()}
        whole = [name for name in stored.names if stored.entries[name].shape[axes[name]] == total]
        if stored.header.get("calls") != PER_TOKEN or not whole:
            return None
        sides.append({name: stored.tensor(name).narrow(axes[name], 0, length) for name in whole})
    return first_step(in_memory(sides[0]), in_memory(sides[1]), length, by_slot=True)[0]


def in_memory(tensors: Mapping[str, Tensor]) -> Side:
    return list(tensors), tensors.__getitem__


def require_comparable(left: Run, right: Run) -> list[str]:
    """Returns the identities of the rows of both runs, in the left run's order. InputError without such a row, and for
    runs of another checkpoint, contract, dtype or prompt."""
    _require_same(SAME_IN_RUNS, (left.path, left.manifest), (right.path, right.manifest))
    mine, theirs = ([one.get("dtype") for one in run.numeric()] for run in (left, right))
    if mine != theirs:
        raise refuse(f"{right.path}: dtype", repr(mine), theirs)
    common = [row for row in left.rows if row in right.rows]
    if not common:
        raise InputError(f"{right.path}: expected at least one row of {left.path}, found none")
    for row in common:
        prompts = [prompt_tokens(run.rows[row]) for run in (left, right)]
        if None not in prompts and prompts[0] != prompts[1]:
            raise InputError(f"{right.path}: row {row!r}: expected the prompt tokens of {left.path}, found others")
    return common


def prompt_tokens(row: Mapping[str, Any]) -> list[int] | None:
    """Returns the prefix tokens that were given, not chosen: those without a margin. None: the row keeps no tokens."""
    if "tokens" not in row.get("prefix", {}):
        return None
    tokens: list[int] = row["prefix"]["tokens"]
    return tokens[: len(tokens) - len(row.get("prefix_margins", []))]


def run_environment(left: Run, right: Run) -> list[str]:
    """Returns one line per difference of the manifests, results apart."""
    sides = []
    for run in (left, right):
        noted = {key: run.manifest.get(key) for key in NOTED}
        numeric = {str(index): one for index, one in enumerate(run.numeric())}
        source = run.manifest.get("source", "stage-replay")
        sides.append({"source": source, "numeric": numeric, "environment": noted})
    return environment_differences(*sides)


def compare_rows(left: dict[str, Any], right: dict[str, Any]) -> LeafComparison:
    """Compares two rows leaf by leaf, floats by their exact value, without the seal, which follows from the rest."""
    return compare_leaves(without(left, SEAL), without(right, SEAL))
