"""Writes our finished runs in the form of the paper's release, so that its analyser, and ours, can read them.

Columns and file names: `published.columns`. Claims and plan: `published.claims`.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.published.claims import WHOLE, claims, named, plan
from experiments.published.columns import FILES, Line
from experiments.run.ledger import write_whole
from experiments.run.reader import Run, read_finished
from minimodel.errors import InputError, refuse

CLAIMS, PLAN = "paper_claims.json", "analysis_plan.json"


def export_runs(paths: Sequence[Path], directory: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Writes `directory`/data/*.csv and, from a whole set of runs, paper_claims.json and analysis_plan.json.

    Returns each CSV file with its number of rows, and the runs that a whole set still lacks. Runs of one experiment in
    several precisions share a file. InputError for a run that is unfinished, failed a gate, or has no ledger in the
    release.
    """
    files: dict[str, list[Line]] = {}
    runs = [_passed(path) for path in paths]
    for run in runs:
        name, line = FILES[run.experiment]
        found = [line(row, run.numeric_of(key)["dtype"]) for key, row in run.rows.items()]
        files.setdefault(name, []).extend(found)
        _require_once(run.path, files[name])
    given = named(runs)
    missing = [name for name in WHOLE if name not in given]
    documents = {} if missing else {CLAIMS: claims(given), PLAN: plan(given)}
    (directory / "data").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        write_whole(directory / "data" / name, _csv(lines))
    for name, value in documents.items():
        write_whole(directory / name, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
    return [(directory / "data" / name, len(lines)) for name, lines in files.items()], missing


def _passed(path: Path) -> Run:
    run, summary = read_finished(path)
    if run.experiment not in FILES:
        raise refuse(f"{path}: experiment", f"one of {' '.join(FILES)}", run.experiment)
    if not summary["passed"]:
        raise InputError(f"{path}: expected a run whose gates all passed, found {len(summary['failed_rows'])} failed")
    return run


def _require_once(path: Path, lines: Sequence[Line]) -> None:
    seen: set[tuple[object, object]] = set()
    for line in lines:
        key = (line.get("precision"), line["row_id"])
        if key in seen:
            raise refuse(f"{path}: exported rows", "each row of a precision once", key[1])
        seen.add(key)


def _csv(lines: Sequence[Line]) -> str:
    """CSV in the release's spelling: true and false, an empty cell for none, floats in full, CRLF."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: _text(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
