"""Two run directories of one schema: every field of every row that both hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.crosscheck.files import environment_differences
from experiments.harness.canonical import canonical
from experiments.harness.ledger import read_ledger
from experiments.harness.rundir import MANIFEST, ROWS, differing_fields
from minimodel.errors import InputError, refuse
from minimodel.files import read_json_object

SAME = ("experiment", "checkpoint", "caps", "visibility", "role_offset")  # of the manifest: otherwise not comparable
NOTED = ("tasks_sha256", "code_sha256", "numeric", "environment", "schema")
SEAL = "row_sha256"


@dataclass(frozen=True)
class Run:
    """A run directory, read only; `rows` by id (DTYPE/id in a run of several), complete ones alone."""

    path: Path
    manifest: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path) -> "Run":
        """InputError when it is no run directory, or a complete row is damaged."""
        if not (path / MANIFEST).is_file():
            raise InputError(f"{path}: expected a run directory with {MANIFEST}, found none")
        rows, _ = read_ledger(path / ROWS)
        names = [f"{row['dtype']}/{row['row']}" if "dtype" in row else row["row"] for row in rows]
        return cls(path, read_json_object(path / MANIFEST), dict(zip(names, rows)))

    def numeric(self) -> list[dict[str, Any]]:
        """The numeric contracts of the run, one a dtype; none where it decoded nothing."""
        return self.manifest.get("numeric", [])

    def numeric_of(self, row: str) -> dict[str, Any]:
        """The numeric contract of one row."""
        dtype = self.rows[row].get("dtype")
        return next(one for one in self.numeric() if dtype is None or one["dtype"] == dtype)


@dataclass(frozen=True)
class RowPair:
    """One row on both sides: how many leaves are equal, which differ, which only one side has."""

    row: str
    equal_fields: int
    differing: list[str]
    one_sided: list[str]

    @property
    def equal(self) -> bool:
        return not self.differing and not self.one_sided


def require_comparable(left: Run, right: Run) -> None:
    """InputError for runs of another checkpoint, contract, dtype or token list."""
    for key in SAME:
        if left.manifest.get(key) != right.manifest.get(key):
            found = "; ".join(differing_fields(left.manifest.get(key), right.manifest.get(key), key)[:2])
            raise InputError(f"{right.path}: expected the {key} of {left.path}, found {found}")
    mine, theirs = ([one.get("dtype") for one in run.numeric()] for run in (left, right))
    if mine != theirs:
        raise refuse(f"{right.path}: dtype", repr(mine), theirs)
    if not common_rows(left, right):
        raise InputError(f"{right.path}: expected at least one row of {left.path}, found none")
    for row in common_rows(left, right):
        prompts = [prompt_tokens(run.rows[row]) for run in (left, right)]
        if None not in prompts and prompts[0] != prompts[1]:
            raise InputError(f"{right.path}: row {row!r}: expected the prompt tokens of {left.path}, found others")


def common_rows(left: Run, right: Run) -> list[str]:
    """Row ids of both, in the left one's order."""
    return [row for row in left.rows if row in right.rows]


def prompt_tokens(row: dict[str, Any]) -> list[int] | None:
    """The tokens that were given and not chosen: all but those with a margin; None in a row that failed closed."""
    if "prefix" not in row:
        return None
    tokens = row["prefix"]["tokens"]
    return tokens[: len(tokens) - len(row.get("prefix_margins", []))]


def run_environment(left: Run, right: Run) -> list[str]:
    """What differs between the manifests, results apart: one line each."""
    sides = []
    for run in (left, right):
        source = run.manifest.get("source", "stage-replay")
        kept = {key: run.manifest.get(key) for key in NOTED}
        kept["numeric"] = {str(index): one for index, one in enumerate(run.numeric())}
        sides.append({"source": source, "numeric": kept.pop("numeric"), "environment": kept})
    return environment_differences(*sides)


def compare_rows(name: str, left: dict[str, Any], right: dict[str, Any]) -> RowPair:
    """Leaf by leaf, floats by their exact value; the seal of a row follows from the rest and is left out."""
    mine, theirs = dict(leaves(left)), dict(leaves(right))
    shared = [path for path in mine if path in theirs]
    differing = [
        f"{path}: A {_short(mine[path])}, B {_short(theirs[path])}"
        for path in shared
        if canonical(mine[path]) != canonical(theirs[path])
    ]
    one_sided = [f"{path}: only in A" for path in mine if path not in theirs]
    one_sided += [f"{path}: only in B" for path in theirs if path not in mine]
    return RowPair(name, len(shared) - len(differing), differing, one_sided)


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf; a list of plain values is one leaf, and so is an empty object."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if key != SEAL or at:
                yield from leaves(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{at}[{index}]")
    else:
        yield at, value


def first_unequal(left: list[Any], right: list[Any]) -> int | None:
    """The first index at which two lists differ, the shorter one's length when it is the other's start."""
    for index, (mine, theirs) in enumerate(zip(left, right)):
        if canonical(mine) != canonical(theirs):
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _short(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 60 else text[:57] + "..."
