"""Compares two boundary or trace files, or two runs: whether they are comparable, what differs, and where first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cache.boundary import SCHEMA as BOUNDARY
from cache.storage import Stored, open_tensors
from experiments.crosscheck.tensors import Difference, first_step, in_memory
from experiments.run.directory import Run
from experiments.run.ledger import compare_leaves
from experiments.run.saving import SCHEMA as TRACE
from experiments.run.saving import token_axis
from minimodel.errors import InputError, refuse

LETTERS = ("A", "B")
PER_TOKEN = "one a token"
SAME_IN_FILES = ("schema", "checkpoint", "contract", "tokens")  # of the header: otherwise not comparable
SAME_IN_RUNS = ("experiment", "checkpoint", "caps", "visibility", "role_offset")  # of the manifest
NOTED = ("tasks_sha256", "code_sha256", "environment", "schema")


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
    def notes(self) -> list[str]:
        """Returns what differs apart from the tensors of both: then the cause is not rounding."""
        equal = self.left.header["functional_sha256"] == self.right.header["functional_sha256"]
        return [] if equal else ["functional state differs: other roles, positions or mask rows were shown"]

    @property
    def only(self) -> list[str]:
        """Returns a note per name that one side alone has, at most 8 per side."""
        sides = zip(LETTERS, (self.left, self.right), (self.right, self.left))
        only = {letter: [n for n in one.names if n not in other.entries][:8] for letter, one, other in sides}
        return [f"step {name} only in {letter}" for letter, names in only.items() for name in names]

    @property
    def equal(self) -> bool:
        return self.first is None and not self.notes and not self.only


def compare_files(left: Path, right: Path) -> FilePair:
    """Opens and compares two files. InputError unless kind, checkpoint, contract, dtype and token list are equal."""
    mine, theirs = (open_tensors(path, (BOUNDARY, TRACE)) for path in (left, right))
    _require_same(SAME_IN_FILES, (left, mine.header), (right, theirs.header))
    _require_dtypes(right, *(side.header["numeric"].get("dtype") for side in (mine, theirs)))
    by_slot = all(side.header.get("calls") == PER_TOKEN for side in (mine, theirs))
    sides = [(side.names, side.tensor) for side in (mine, theirs)]
    first, differing, shared = first_step(sides[0], sides[1], len(mine.header["tokens"]), by_slot)
    return FilePair(mine, theirs, first, shared, differing)


def _require_same(
    keys: Sequence[str], left: tuple[Path, Mapping[str, Any]], right: tuple[Path, Mapping[str, Any]]
) -> None:
    """Raises InputError, naming the first differing leaves, unless both objects are equal under `keys`."""
    for key in keys:
        mine, theirs = left[1].get(key), right[1].get(key)
        if mine != theirs:
            lines = compare_leaves(mine, theirs, key).lines("expected", "found")
            found = "others" if key == "tokens" else "; ".join(lines[:2])
            raise InputError(f"{right[0]}: expected the {key} of {left[0]}, found {found}")


def _require_dtypes(path: Path, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise refuse(f"{path}: dtype", repr(mine), theirs)


def environment_differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns one line per difference of source, numerics and environment."""
    parts = ("source", "numeric", "environment")
    return compare_leaves({k: mine.get(k) for k in parts}, {k: theirs.get(k) for k in parts}).lines("A", "B")


def run_environment(left: Run, right: Run) -> list[str]:
    """Returns one line per difference of the manifests, results apart."""
    mine, theirs = (
        {
            "source": run.manifest.get("source", "stage-replay"),
            "numeric": {str(index): one for index, one in enumerate(run.manifest["numeric"])},
            "environment": {key: run.manifest.get(key) for key in NOTED},
        }
        for run in (left, right)
    )
    return environment_differences(mine, theirs)


def common_prefix_step(left: Path, right: Path, length: int) -> Difference | None:
    """Returns the first differing step of two token-by-token traces before slot `length`, where their tokens part;
    None where a trace kept fewer slots than it has tokens."""
    sides: list[dict[str, Tensor]] = []
    for path in (left, right):
        stored = open_tensors(path, TRACE)
        total = len(stored.header["tokens"])
        tensors = {name: stored.tensor(name) for name in stored.names}
        whole = {n: one for n, one in tensors.items() if one.ndim > 2 and one.shape[token_axis(one)] == total}
        if stored.header.get("calls") != PER_TOKEN or not whole:
            return None
        sides.append({name: one.narrow(token_axis(one), 0, length) for name, one in whole.items()})
    return first_step(in_memory(sides[0]), in_memory(sides[1]), length, by_slot=True)[0]


def require_comparable(left: Run, right: Run) -> list[str]:
    """Returns the identities of the rows of both runs, in the left run's order. InputError without such a row, and for
    runs of another checkpoint, contract, dtype or prompt."""
    _require_same(SAME_IN_RUNS, (left.path, left.manifest), (right.path, right.manifest))
    _require_dtypes(right.path, *([one.get("dtype") for one in run.manifest["numeric"]] for run in (left, right)))
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
    tokens: list[int] | None = row.get("prefix", {}).get("tokens")
    return None if tokens is None else tokens[: len(tokens) - len(row.get("prefix_margins", []))]
