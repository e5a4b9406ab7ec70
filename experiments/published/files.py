"""Our finished runs as the CSV files of the paper's release, so that its analyser, and ours, can read them.

Columns and file names: `exporting.columns`.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.ledger import write_whole
from experiments.harness.reader import read_finished
from experiments.published.columns import FILES, Line
from minimodel.errors import InputError, refuse


def export_runs(runs: Sequence[Path], directory: Path) -> list[tuple[Path, int]]:
    """Writes `directory`/data/*.csv and returns each file with its number of rows. Runs of one experiment in several
    precisions share a file. InputError for a run that is unfinished, failed a gate, or has no ledger in the release.
    """
    files: dict[str, list[Line]] = {}
    for path in runs:
        run, summary = read_finished(path)
        if run.experiment not in FILES:
            raise refuse(f"{path}: experiment", f"one of {' '.join(FILES)}", run.experiment)
        if not summary["passed"]:
            raise InputError(
                f"{path}: expected a run whose gates all passed, found {len(summary['failed_rows'])} failed"
            )
        name, line = FILES[run.experiment]
        found = [line(row, run.numeric_of(key)["dtype"]) for key, row in run.rows.items()]
        files.setdefault(name, []).extend(found)
        _require_once(path, files[name])
    (directory / "data").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        write_whole(directory / "data" / name, _csv(lines))
    return [(directory / "data" / name, len(lines)) for name, lines in files.items()]


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
