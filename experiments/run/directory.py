"""A run directory: lock, manifest, ledgers, summary. Resumes what is there, refuses what does not fit, deletes nothing.

`rows.jsonl` holds rows in source order. A row that is done before an earlier one, and every row of a rank other than 0,
goes with its timing to a partial ledger, `partial/rows-RANK.jsonl`, sealed in the same way. A row is found by its
index, so any later process, with any number of ranks or none, takes every row that is there. A partial ledger is locked
while its rank lives. The directory is removed when the run is finished and all rows stand in `rows.jsonl`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from experiments.run.exits import readable
from experiments.run.ledger import (
    append_line,
    canonical,
    compare_leaves,
    drop_tail,
    lock,
    read_ledger,
    require_distinct,
    row_key,
    seal,
    sha256_file,
    unseal,
    whole_lines,
    without,
    write_whole,
)
from experiments.run.records import Manifest, Row, Summary, Timing, fields
from experiments.run.summary import gate_counts
from minimodel.errors import InputError, refuse
from minimodel.files import MAX_JSON_BYTES, read_json_object

MANIFEST, ROWS, TIMING, SUMMARY, REPORT = "manifest.json", "rows.jsonl", "timing.jsonl", "summary.json", "report.md"
LOCK, PARTIAL = ".lock", "partial"
BESIDE = ("timing", "row_sha256")  # what a line of a partial ledger holds beside the row
INFORMATION: Final = "information"  # the one part of a manifest that may differ on resume: paths, commit, command
INPUTS = ("source", "left", "right", "tasks", "checkpoint")  # of the information: paths that the command reads
Keep = Callable[[int, Row, Timing], Any]  # keeps a finished row: its index, the row, its timing


@contextmanager
def partial_ledger(run: Path, rank: int) -> Iterator[Keep]:
    """Yields the function that appends to a rank's partial ledger, which is locked meanwhile.

    InputError when a process of an earlier job still holds it.
    """
    (run / PARTIAL).mkdir(exist_ok=True)
    handle = lock(run / PARTIAL / f"rows-{rank}.jsonl")
    try:
        yield lambda index, row, timing: _append_partial(run, rank, {**row, "timing": timing})
    finally:
        os.close(handle)


def _append_partial(run: Path, rank: int, waiting: Row) -> None:
    append_line(run / PARTIAL / f"rows-{rank}.jsonl", seal(waiting))


class RunDirectory:
    """One run on disk, held under a lock that is released when its process ends.

    rows: those that `rows.jsonl` held when it was opened. length: how many it holds now. waiting: finished rows by
    index, with their timing, to be taken when all before them are there. dropped, dropped_waiting: torn bytes cut off
    the ledger, and off partial ones.
    """

    def __init__(self, path: Path, manifest: Manifest, fresh: bool) -> None:
        """Creates or reopens the run. InputError, with nothing written, where the path holds another run or other
        files, the manifest is too large to be read back, or another process holds the run.
        """
        self.path = path
        if fresh and path.exists():
            _require_inputs_apart(path, manifest["information"])
            set_aside(path, MANIFEST, ("schema", "row_order"), LOCK)
        self.manifest: Manifest = json.loads(canonical(manifest))
        self._require_takeable()  # before a lock file is put there, and again once the lock is held
        path.resolve().mkdir(parents=True, exist_ok=True)  # where a link leads, nothing may stand yet
        self._lock = lock(path / LOCK, path)
        try:
            self._require_takeable()
            self._open()
        except BaseException:
            self.close()
            raise

    def _require_takeable(self) -> None:
        """Raises InputError unless the path is this run, nothing, or empty, and the manifest can be read back."""
        path, order, size = self.path / MANIFEST, self.manifest["row_order"], len(_document(self.manifest))
        require_distinct(order, f"{path}: row_order")
        if size > MAX_JSON_BYTES:
            raise InputError(
                f"{path}: expected at most {MAX_JSON_BYTES} bytes, found {size} for {len(order)} rows; "
                "take shorter ids, or share the tasks out over several runs"
            )
        if path.exists():
            require_same_manifest(self.manifest, self.path)
        elif self.path.exists() and any(found.name not in (LOCK, MANIFEST + ".part") for found in self.path.iterdir()):
            raise InputError(f"{self.path}: expected a run directory or an empty one, found files without {MANIFEST}")

    def _open(self) -> None:
        if not (self.path / MANIFEST).exists():
            write_whole(self.path / MANIFEST, _document(self.manifest))
        self.rows, self.dropped = read_ledger(self.path / ROWS, self.manifest["row_order"])
        self.length = len(self.rows)
        for path in self._partial():  # InputError when a rank of an earlier job still writes
            os.close(lock(path))
        timing = self.path / TIMING
        torn = {path: whole_lines(path)[1] for path in (timing, *self._partial())} | {self.path / ROWS: self.dropped}
        for path, size in torn.items():
            if size:  # the next line would otherwise be glued to it
                drop_tail(path, size)
        self.dropped_waiting = sum(torn[path] for path in self._partial())
        self.look_again()

    def _partial(self) -> list[Path]:
        return sorted((self.path / PARTIAL).glob("rows-*.jsonl"))

    def look_again(self) -> None:
        """Reads what ranks have written meanwhile; none may be writing now.

        InputError names a line that is damaged, of another run, or not the row that another ledger holds.
        """
        order = self.manifest["row_order"]
        self.waiting: dict[int, Row] = {}
        for path in self._partial():
            for number, line in enumerate(whole_lines(path)[0], start=1):
                where = f"{path} line {number}"
                row = unseal(line, where)
                index = row.get("index")
                if type(index) is not int or not 0 <= index < len(order) or row_key(row) != order[index]:
                    found = f"{index!r} {row['row']!r:.80}"
                    raise InputError(f"{where}: expected a row of this run's manifest, found {found}")
                if len(self.rows) <= index < self.length:  # moved to `rows.jsonl` by this process
                    continue
                held = self.rows[index] if index < len(self.rows) else self.waiting.setdefault(index, row)
                if without(held, *BESIDE) != without(row, *BESIDE):
                    raise InputError(
                        f"{where}: expected row {order[index]} as elsewhere in this run, found other bytes"
                    )

    def inform(self, name: str, key: str, text: str) -> bool:
        """Keeps a text under `name` and `key` of the manifest's information; False where it stands there already."""
        manifest = fields(read_json_object(self.path / MANIFEST), Manifest, self.path / MANIFEST)
        kept = manifest[INFORMATION].setdefault(name, {})
        if kept.get(key) == text:
            return False
        kept[key] = text
        write_whole(self.path / MANIFEST, _document(manifest))
        return True

    def append(self, row: Row, timing: Timing) -> None:
        """Adds the next row to `rows.jsonl`, and its timing to the file beside it."""
        assert row_key(row) == self.manifest["row_order"][self.length], "rows are written in the manifest's order"
        append_line(self.path / ROWS, seal(row))
        append_line(self.path / TIMING, canonical(timing))
        self.length += 1

    def keep(self, index: int, row: Row, timing: Timing) -> None:
        """Lets a finished row wait for `take`, in a partial ledger unless it is the next."""
        self.waiting[index] = {**row, "timing": timing}
        if index != self.length:
            (self.path / PARTIAL).mkdir(exist_ok=True)
            _append_partial(self.path, 0, self.waiting[index])

    def take(self) -> Row | None:
        """Moves the next row to `rows.jsonl` and returns it; None where it does not wait."""
        waiting = self.waiting.pop(self.length, None)
        if waiting is None:
            return None
        row = cast(Row, without(waiting, *BESIDE))
        self.append(row, waiting["timing"])
        return row

    def finish(self, summary: Summary, report: str) -> None:
        """Writes summary.json and report.md, and removes the partial ledgers, whose rows stand in `rows.jsonl`."""
        write_whole(self.path / SUMMARY, _document(summary))
        write_whole(self.path / REPORT, report)
        for path in self._partial():
            path.unlink()
        with suppress(OSError):  # not there, or holding a file of the user's
            (self.path / PARTIAL).rmdir()

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)


def _document(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _require_inputs_apart(path: Path, information: Mapping[str, Any]) -> None:
    """InputError where an input of the command lies in the directory that --fresh is about to rename."""
    for name in INPUTS:
        given = information.get(name)
        if given is not None and Path(given).resolve().is_relative_to(path.resolve()):
            raise InputError(f"{path}: expected a directory to set aside, found the {name} {given} in it; choose --out")


def set_aside(path: Path, document: str, keys: tuple[str, ...], lock_name: str = "") -> None:
    """Renames a directory that holds `document`, a JSON object with `keys`, to the next free NAME.N beside it.

    InputError, with nothing touched, for a directory of anything else, for one that the working directory lies in, and
    for one whose lock is held. An empty directory stays.
    """
    if not require_own(path, document, keys, lock_name):
        return
    place = path.resolve()
    if lock_name:
        os.close(lock(place / lock_name, path))
    number = 1
    while place.with_name(f"{place.name}.{number}").exists():
        number += 1
    place.rename(place.with_name(f"{place.name}.{number}"))


def require_own(path: Path, document: str, keys: tuple[str, ...], lock_name: str = "") -> bool:
    """Returns whether there is anything to set aside; InputError, as in `set_aside`, where it is not ours."""
    place = path.resolve()
    if not any(entry.name != lock_name for entry in place.iterdir()):
        return False
    found = read_json_object(path / document) if (path / document).is_file() else {}
    if not all(key in found for key in keys):
        raise InputError(f"{path}: expected a directory made by this command to set aside, found no {document} of one")
    if Path.cwd().is_relative_to(place):
        raise InputError(f"{path}: expected a directory to set aside, found the working directory or one above it")
    return True


def require_same_manifest(wanted: Manifest, path: Path) -> None:
    """Raises InputError, naming the fields, where the run in `path` has another manifest, information apart."""
    mine, found = json.loads(canonical(wanted)), read_json_object(path / MANIFEST)
    differing = compare_leaves(without(mine, INFORMATION), without(found, INFORMATION)).lines("expected", "found")
    if differing:
        shown = "; ".join(differing[:4]) + (f"; and {len(differing) - 4} more" if len(differing) > 4 else "")
        where = path / MANIFEST
        raise InputError(f"{where}: expected this run's manifest, found another's ({shown}); choose --out or --fresh")


@dataclass(frozen=True)
class Run:
    """A run directory read back, of any experiment."""

    path: Path
    manifest: Manifest
    rows: Mapping[str, Row]  # by identity (`row_key`), in the manifest's order; complete lines only
    summary: Summary | None  # None while a row or the summary is missing

    @property
    def experiment(self) -> str:
        return str(self.manifest["experiment"])

    @property
    def ledger_sha256(self) -> str:
        return sha256_file(self.path / ROWS)

    def numeric_of(self, key: str) -> dict[str, Any]:
        """Returns the numeric contract under which row `key` was decoded: that of its cell, named
        DTYPE/ATTENTION/LINEAR, or of its dtype, or the only one."""
        row, contracts = self.rows[key], self.manifest["numeric"]
        if "cell" in row:
            fitting = [n for n in contracts if row["cell"] == f"{n['dtype']}/{n.get('attention')}/{n.get('linear')}"]
        else:
            fitting = [n for n in contracts if row.get("dtype", n["dtype"]) == n["dtype"]]
        if len(fitting) != 1:
            raise refuse(f"{self.path / MANIFEST}: numeric", f"one contract of row {key}", f"{len(fitting)} of them")
        return fitting[0]


def read_run(path: Path) -> Run:
    """Reads a run in whatever state. InputError where it is none, is damaged, its rows are not the manifest's, or its
    summary's verdict does not follow from the ledger: no failed run may be read as a passed one.
    """
    if not (path / MANIFEST).is_file():
        found = "nothing" if not path.exists() else "a file" if path.is_file() else "no manifest"
        raise InputError(f"{path}: expected a run directory, found {found}")
    manifest = fields(read_json_object(path / MANIFEST), Manifest, path / MANIFEST)
    numeric, order, summary = manifest["numeric"], manifest["row_order"], None
    if not numeric or not all(isinstance(one.get("dtype"), str) for one in numeric):
        raise refuse(f"{path / MANIFEST}: numeric", "at least one numeric contract, each with its dtype", numeric)
    rows, torn = read_ledger(path / ROWS, order)
    if not torn and len(rows) == len(order) and (path / SUMMARY).exists():
        summary = fields(read_json_object(path / SUMMARY), Summary, path / SUMMARY)
        for key, value in {"rows": len(rows), "gates": gate_counts(rows)}.items():
            if summary.get(key) != value:
                raise refuse(f"{path / SUMMARY}: {key}", f"{value} (from {ROWS})", summary.get(key))
        if summary.get("passed") and not all(row["passed"] for row in rows):
            raise refuse(f"{path / SUMMARY}: passed", f"False (from {ROWS})", True)
    read = [fields(row, Row, f"{path / ROWS}: row {readable(row_key(row))}") for row in rows]
    return Run(path, manifest, {row_key(row): row for row in read}, summary)


def read_finished(path: Path) -> tuple[Run, Summary]:
    """Reads a run and its summary. InputError also where a row or the summary is missing."""
    run = read_run(path)
    if run.summary is None:
        of = f"{len(run.rows)} of {len(run.manifest['row_order'])} rows"
        raise InputError(f"{path}: expected a finished run, found {of}")
    return run, run.summary
