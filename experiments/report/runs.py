"""Run directories read back for the report, with a line for each fault."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.run.directory import MANIFEST, ROWS, SUMMARY, read_run
from experiments.run.exits import readable
from experiments.run.ledger import row_key
from experiments.run.summary import matched_prefixes
from minimodel.errors import InputError, refuse
from minimodel.files import parse_json, read_bytes

TIMING = "timing.jsonl"


@dataclass(frozen=True)
class Run:
    """One run directory. `summary` is None while the run is unfinished; `anchor` is its identifier within a page."""

    path: Path
    name: str  # as tables head their columns with it
    anchor: str
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    timing: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Spent on the rows, all sessions together."""
        return float(sum(line.get("seconds", 0.0) for line in self.timing))

    @property
    def experiment(self) -> str:
        return str(self.manifest["experiment"])

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(one["dtype"] for one in self.manifest["numeric"]))

    def faults(self) -> list[str]:
        """One line for each thing that keeps this run's numbers from being used as they stand."""
        found = []
        if self.summary is None:
            found.append(f"{self.name}: unfinished, {len(self.rows)} of {len(self.manifest['row_order'])} rows")
        for row in self.rows:
            if not row["passed"]:
                found.append(f"{self.name}: row {row_key(row)} failed {failure(row)}")
        if self.summary is not None and not self.summary["passed"] and not found:
            found.append(f"{self.name}: the summary says that a gate failed")
        return found


def failure(row: dict[str, Any]) -> str:
    """The gates that a row failed, and the recorded reason; empty where it passed."""
    names = ", ".join(gate for gate, passed in row["gates"].items() if not passed)
    return f"{names} ({row['failure']})" if names and row.get("failure") else names


class Fields(dict[str, Any]):
    """A JSON object of a file. A field that it lacks is an InputError, because a run of another version wrote it."""

    source: Path | str

    def __missing__(self, key: str) -> Any:
        raise InputError(
            f"{self.source}: expected the field {key!r}, found none; the run was written by another version of the code"
        )


def fields(value: Any, source: Path | str) -> Any:
    """The JSON value with every object as `Fields`."""
    if isinstance(value, list):
        return [fields(inner, source) for inner in value]
    if not isinstance(value, dict):
        return value
    found = Fields((key, fields(inner, source)) for key, inner in value.items())
    found.source = source
    return found


@dataclass(frozen=True)
class Pair:
    """One comparison of two arms in one precision of a run."""

    run: Run
    dtype: str
    summary: dict[str, Any]
    rows: list[tuple[str, dict[str, Any]]]  # (key, ledger row) of the rows that hold the comparison

    @property
    def name(self) -> str:
        return str(self.summary["comparison"])

    @property
    def arms(self) -> tuple[str, str]:
        left, right = self.name.split(":")
        return left, right

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        """The comparison's entry in each row."""
        return [row["comparisons"][self.name] for _, row in self.rows]

    @property
    def label(self) -> str:
        return f"{self.run.name}, {self.dtype}"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in the order given. InputError for what is no run directory, is damaged, or contradicts itself."""
    runs: list[Run] = []
    for path in paths:
        if any(path.resolve() == run.path.resolve() for run in runs):
            raise refuse("runs", "each run once", str(path))
        runs.append(_read_run(path, _anchor(path.name, [run.anchor for run in runs])))
    return runs


def find_runs(root: Path) -> list[Path]:
    """The run directories right under `root`, by name; those set aside by --fresh (NAME.1, ...) are left out."""
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    kept = [path for path in found if not re.fullmatch(r".+\.\d+", path.name)]
    if not kept:
        raise InputError(f"{root}: expected run directories, found none; make them with: python -m experiments.study")
    return kept


def _read_run(path: Path, anchor: str) -> Run:
    run = read_run(path)
    if not isinstance(run.manifest.get("environment"), dict):
        raise refuse(f"{path / MANIFEST}: environment", "an object", run.manifest.get("environment"))
    return Run(
        path,
        readable(path.name),
        anchor,
        fields(run.manifest, path / MANIFEST),
        [fields(row, f"{path / ROWS}: row {readable(key)}") for key, row in run.rows.items()],
        fields(run.summary, path / SUMMARY),
        fields(_timing(path / TIMING), path / TIMING),
    )


def _timing(path: Path) -> list[dict[str, Any]]:
    """One {row, seconds, arms} a decoded row."""
    if not path.exists():
        return []
    return [parse_json(line, path) for line in read_bytes(path).split(b"\n")[:-1] if line]


def _anchor(name: str, taken: list[str]) -> str:
    base = "run-" + (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "unnamed")
    anchor, number = base, 2
    while anchor in taken:
        anchor, number = f"{base}-{number}", number + 1
    return anchor


def pairs(run: Run) -> Iterator[Pair]:
    """Every compared pair of arms that the run's summary tells of."""
    if run.summary is not None:
        yield from _pairs(run, run.summary, next(iter(run.dtypes), ""))


def _pairs(run: Run, block: dict[str, Any], dtype: str) -> Iterator[Pair]:
    if is_pair(block):
        name = block["comparison"]
        rows = [row for row in run.rows if row.get("dtype", dtype) == dtype and name in row["comparisons"]]
        yield Pair(run, dtype, block, [(row_key(row), row) for row in rows])
    for inner_dtype, inner in block.get("precisions", {}).items():
        yield from _pairs(run, inner, inner_dtype)


def is_pair(block: dict[str, Any]) -> bool:
    """Whether the block is one comparison's endpoints, over at least one row."""
    return bool(block.get("compared_rows")) and "suffix_disagreement" in block and "comparison" in block


def matched_matrices(runs: Sequence[Run]) -> Iterator[tuple[Run, Run, dict[str, Any]]]:
    """Yields every two finished matrices of one task file and checkpoint in two precisions, with their joined prefixes
    (`cross_precision.matched_prefixes`)."""
    matrices = [run for run in runs if run.experiment == "matrix" and run.rows and run.summary is not None]
    for left, right in itertools.combinations(matrices, 2):
        same = all(left.manifest.get(key) == right.manifest.get(key) for key in ("tasks_sha256", "checkpoint"))
        if same and left.dtypes != right.dtypes:
            yield left, right, matched_prefixes(left.rows, right.rows, (left.dtypes[0], right.dtypes[0]))
