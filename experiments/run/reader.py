"""Reads a run directory back, whatever made it: manifest, rows by identity, summary. The one reader of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.run.directory import MANIFEST, ROWS, SUMMARY
from experiments.run.ledger import read_ledger, row_key, sha256_file
from experiments.run.summary import gate_counts
from minimodel.errors import InputError, refuse
from minimodel.files import read_json_object

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run directory, read only."""

    path: Path
    manifest: dict[str, Any]
    rows: Mapping[str, Row]  # by identity (`ledger.row_key`), in the manifest's order; complete lines only
    summary: dict[str, Any] | None  # None while a row or the summary is missing

    @property
    def experiment(self) -> str:
        return str(self.manifest["experiment"])

    @property
    def ledger_sha256(self) -> str:
        return sha256_file(self.path / ROWS)

    def numeric(self) -> list[dict[str, Any]]:
        """Returns the run's numeric contracts, one per dtype or cell; empty where it decoded nothing."""
        contracts: list[dict[str, Any]] = self.manifest["numeric"]
        return contracts

    def numeric_of(self, key: str) -> dict[str, Any]:
        """Returns the numeric contract under which row `key` was decoded."""
        row = self.rows[key]
        fitting = [one for one in self.numeric() if _decoded(one, row)]
        if len(fitting) != 1:
            raise refuse(f"{self.path / MANIFEST}: numeric", f"one contract of row {key}", f"{len(fitting)} of them")
        return fitting[0]


def _decoded(numeric: Mapping[str, Any], row: Row) -> bool:
    """Whether this contract is the row's. A cell is named DTYPE/ATTENTION/LINEAR; a row without cell and dtype has the
    run's only contract."""
    if "cell" in row:
        return bool(row["cell"] == "/".join(str(numeric.get(part)) for part in ("dtype", "attention", "linear")))
    return "dtype" not in row or bool(row["dtype"] == numeric.get("dtype"))


def read_run(path: Path) -> Run:
    """Reads a run in whatever state. InputError where it is none, is damaged, or its rows are not the manifest's."""
    if not (path / MANIFEST).is_file():
        found = "nothing" if not path.exists() else "a file" if path.is_file() else "no manifest"
        raise InputError(f"{path}: expected a run directory, found {found}")
    manifest = read_json_object(path / MANIFEST)
    for key, kind in (("experiment", str), ("numeric", list), ("row_order", list)):
        if not isinstance(manifest.get(key), kind):
            raise refuse(f"{path / MANIFEST}: {key}", f"a {kind.__name__}", manifest.get(key))
    numeric = manifest["numeric"]
    if not numeric or not all(isinstance(one, dict) and isinstance(one.get("dtype"), str) for one in numeric):
        raise refuse(f"{path / MANIFEST}: numeric", "at least one numeric contract, each with its dtype", numeric)
    if not all(isinstance(name, str) for name in manifest["row_order"]):
        raise refuse(f"{path / MANIFEST}: row_order", "a list of row ids", manifest["row_order"])
    rows, torn = read_ledger(path / ROWS, manifest["row_order"])
    summary = None
    if not torn and len(rows) == len(manifest["row_order"]) and (path / SUMMARY).exists():
        summary = read_json_object(path / SUMMARY)
        _require_agreement(path, rows, summary)
    return Run(path, manifest, {row_key(row): {**row} for row in rows}, summary)


def _require_agreement(path: Path, rows: Sequence[Mapping[str, Any]], summary: dict[str, Any]) -> None:
    """InputError unless the summary's verdict follows from the ledger: no failed run may be read as a passed one."""
    wanted = {"rows": len(rows), "gates": gate_counts(rows)}
    for key, value in wanted.items():
        if summary.get(key) != value:
            raise refuse(f"{path / SUMMARY}: {key}", f"{value} (from {ROWS})", summary.get(key))
    if summary.get("passed") and not all(row["passed"] for row in rows):
        raise refuse(f"{path / SUMMARY}: passed", f"False (from {ROWS})", True)


def read_finished(path: Path) -> tuple[Run, dict[str, Any]]:
    """Reads a run and its summary. InputError also where a row or the summary is missing."""
    run = read_run(path)
    if run.summary is None:
        raise InputError(
            f"{path}: expected a finished run, found {len(run.rows)} of {len(run.manifest['row_order'])} rows"
        )
    return run, run.summary
