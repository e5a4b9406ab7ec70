"""A run directory: lock, manifest, ledgers; resuming what is there, refusing what does not fit, deleting nothing.

Rank r of a sharded run appends its rows, sealed as in the main ledger, to a partial ledger, `partial/rows-r.jsonl`. A
row is known by its own index, so whoever opens the run next, with any number of ranks or none, takes every row that is
there. A partial ledger is locked while its rank lives; the directory goes when the run is finished and all of it stands
in `rows.jsonl`.

Reads a run directory back, whatever made it: manifest, rows by identity, summary. The one reader of runs.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.run.ledger import (
    append_line,
    append_row,
    canonical,
    compare_leaves,
    drop_tail,
    lock,
    open_own,
    read_ledger,
    require_distinct,
    row_key,
    sha256_file,
    sha256_text,
    unsealed,
    whole_lines,
    without,
    write_whole,
)
from experiments.run.records import Manifest, Row, Summary, Timing
from experiments.run.summary import gate_counts
from minimodel.errors import InputError, refuse
from minimodel.files import MAX_JSON_BYTES, read_json_object

PARTIAL = "partial"


class PartialLedger:
    """One rank's rows and their timing, held under a lock of their own."""

    def __init__(self, run: Path, rank: int) -> None:
        """InputError when a process of an earlier job still holds it."""
        (run / PARTIAL).mkdir(exist_ok=True)
        self._rows, self._timing = (run / PARTIAL / f"{kind}-{rank}.jsonl" for kind in ("rows", "timing"))
        self._lock = lock(self._rows)

    def append(self, row: Row, timing: Timing) -> None:
        append_row(self._rows, row)
        append_line(self._timing, canonical(timing))

    def close(self) -> None:
        os.close(self._lock)


@dataclass(frozen=True)
class Line:
    """A row in a partial ledger: its file and bytes, its digest there, its timing line where there is one."""

    path: Path
    number: int
    start: int
    stop: int
    row_sha256: str
    timing: str | None

    def read(self) -> tuple[str, Row]:
        """The sealed line and its row; InputError when the file changed since it was scanned."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = file.read(self.stop - self.start)
        return text.decode("ascii", "replace"), unsealed(text, f"{self.path} line {self.number}")


def require_unheld(run: Path) -> None:
    """InputError when a rank of an earlier job still writes."""
    for path in _ledgers(run):
        os.close(lock(path))


def drop_torn(run: Path) -> int:
    """Cuts torn last lines off rows and timing; returns how many bytes of rows. Nobody may be writing."""
    dropped = 0
    for path in _files(run):
        torn = whole_lines(path)[1]
        if torn:
            drop_tail(path, torn)
            dropped += torn if path in _ledgers(run) else 0
    return dropped


def scan(run: Path, keys: list[str], written: list[str | None]) -> dict[int, Line]:
    """Every complete row that the partial ledgers hold and the main one does not, by index.

    keys: the row names in source order. written: `row_sha256` of each row of the main ledger, None where it need not be
    compared. InputError names a line that is damaged, of another run, or not the row that another ledger holds.
    """
    found: dict[int, Line] = {}
    for path in _ledgers(run):
        timings = _timings(path.with_name(path.name.replace("rows-", "timing-")))
        start = 0
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            for number, text in enumerate(file, start=1):
                where, stop = f"{path} line {number}", start + len(text)
                if not text.endswith(b"\n"):
                    break
                index, row = _indexed(text[:-1], where, keys)
                digest = row["row_sha256"]
                known = written[index] if index < len(written) else None
                known = found[index].row_sha256 if index in found else known
                if known not in (None, digest):
                    raise InputError(f"{where}: expected row {keys[index]} as elsewhere in this run, found other bytes")
                if index >= len(written):
                    found[index] = Line(path, number, start, stop - 1, digest, timings.get(keys[index]))
                start = stop
    return found


def clear(run: Path) -> None:
    """Removes the partial ledgers, all of whose rows stand in the main one."""
    for path in _files(run):
        path.unlink()
    with suppress(OSError):  # not there, or holding a file of the user's
        (run / PARTIAL).rmdir()


def _files(run: Path) -> list[Path]:
    return sorted((run / PARTIAL).glob("*-*.jsonl"))


def _ledgers(run: Path) -> list[Path]:
    return sorted((run / PARTIAL).glob("rows-*.jsonl"))


def _indexed(text: bytes, where: str, keys: list[str]) -> tuple[int, Row]:
    row = unsealed(text, where)
    index = row.get("index")
    if type(index) is not int or not 0 <= index < len(keys) or row_key(row) != keys[index]:
        raise InputError(f"{where}: expected a row of this run's manifest, found {index!r} {row.get('row')!r:.80}")
    return index, row


def _timings(path: Path) -> dict[str, str]:
    """Returns the timing lines by row name; one that cannot be read is left out, as no result depends on it."""
    found = {}
    for line in whole_lines(path)[0]:
        try:
            found[str(json.loads(line)["row"])] = line.decode("ascii")
        except (ValueError, KeyError, TypeError):
            continue
    return found


MANIFEST, ROWS, TIMING, SUMMARY, REPORT = "manifest.json", "rows.jsonl", "timing.jsonl", "summary.json", "report.md"
LOCK = ".lock"
INFORMATION = "information"  # the one part of a manifest that may differ on resume: paths, commit, command


class RunDirectory:
    """One run on disk, held under a lock that dies with its holder.

    rows: those that `rows.jsonl` held when it was opened. length: those it holds now. waiting: rows by index that ranks
    of a sharded run wrote to partial ledgers, ready to be taken when all before them are there.
    """

    def __init__(self, path: Path, manifest: Manifest, fresh: bool) -> None:
        """Creates or reopens the run. InputError, with nothing written, when it is another run or no run, or too large
        to be read back, or another process holds it.
        """
        self.path = path
        if fresh and path.exists():
            set_aside(path, MANIFEST, ("schema", "row_order"), LOCK)
        plain: Manifest = json.loads(canonical(manifest))
        _require_takeable(path, plain)  # before a lock file is put there, and again once the lock is held
        path.resolve().mkdir(parents=True, exist_ok=True)  # where a link leads, nothing may stand yet
        self._lock = lock(path / LOCK, path)
        try:
            _require_takeable(path, plain)
            self._open(path, plain)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, manifest: Manifest) -> None:
        if not (path / MANIFEST).exists():
            write_whole(path / MANIFEST, _manifest_text(manifest))
        self.manifest = manifest
        self.rows, self.dropped = read_ledger(path / ROWS, manifest["row_order"])
        if self.dropped:
            drop_tail(path / ROWS, self.dropped)
        torn = whole_lines(path / TIMING)[1]
        if torn:  # the next line would otherwise be glued to it
            drop_tail(path / TIMING, torn)
        self._written: list[str | None] = [row["row_sha256"] for row in self.rows]
        require_unheld(path)
        self.dropped_waiting = drop_torn(path)
        self.look_again()

    def inform(self, name: str, key: str, text: str) -> bool:
        """Keeps a text under `name` and `key` of the manifest's information; False where it stands there already."""
        manifest = read_json_object(self.path / MANIFEST)
        kept = manifest[INFORMATION].setdefault(name, {})
        if kept.get(key) == text:
            return False
        kept[key] = text
        write_whole(self.path / MANIFEST, _manifest_text(manifest))
        return True

    @property
    def length(self) -> int:
        return len(self._written)

    def look_again(self) -> None:
        """Reads what ranks have written meanwhile; none may be writing now. InputError names a damaged line."""
        self.waiting = scan(self.path, list(self.manifest["row_order"]), self._written)

    def append(self, row: Row, timing: Timing) -> None:
        """Adds a finished row; its timing goes to a file of its own, so that two runs write one and the same ledger."""
        assert row_key(row) == self.manifest["row_order"][self.length], "rows are written in the manifest's order"
        append_row(self.path / ROWS, row)
        self._written.append(None)
        append_line(self.path / TIMING, canonical(timing))

    def put_aside(self, rows: Sequence[tuple[Row, Timing]]) -> None:
        """Writes finished rows and their timings to a partial ledger, where they wait for the rows before them."""
        if not rows:
            return
        ledger = PartialLedger(self.path, 0)
        try:
            for row, timing in rows:
                ledger.append(row, timing)
        finally:
            ledger.close()
        self.look_again()

    def take(self, index: int) -> Row | None:
        """Returns row `index` if it is there. A row in a partial ledger is first appended to `rows.jsonl`."""
        if index < len(self.rows):
            return self.rows[index]
        line = self.waiting.pop(index, None)
        if line is None:
            return None
        assert index == self.length, "rows are taken in source order"
        text, row = line.read()
        append_line(self.path / ROWS, text)
        self._written.append(line.row_sha256)
        if line.timing is not None:
            append_line(self.path / TIMING, line.timing)
        return row

    def written(self) -> list[Row]:
        """All rows, read back: what a summary is made of, so that a long run need not hold them while it decodes."""
        return read_ledger(self.path / ROWS)[0]

    def attach(self, name: str, text: str) -> None:
        """Keeps an input beside the ledger, written before the first row; InputError when other bytes stand there."""
        path = self.path / name
        if not path.exists():
            write_whole(path, text)
        elif sha256_file(path) != sha256_text(text):
            raise InputError(f"{path}: expected SHA-256 {sha256_text(text)}, found {sha256_file(path)}")

    def finish(self, summary: Summary, report: str) -> None:
        """Writes summary.json and report.md; what partial ledgers still hold stands in `rows.jsonl` by then."""
        write_whole(self.path / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=True, allow_nan=False) + "\n")
        write_whole(self.path / REPORT, report)
        clear(self.path)

    def close(self) -> None:
        """Lets the lock go."""
        os.close(self._lock)


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _require_takeable(path: Path, manifest: Manifest) -> None:
    """InputError unless `path` is this run, or nothing, or an empty directory, and the manifest can be read back."""
    require_distinct(manifest["row_order"], f"{path / MANIFEST}: row_order")
    size = len(_manifest_text(manifest))
    if size > MAX_JSON_BYTES:
        raise InputError(
            f"{path / MANIFEST}: expected at most {MAX_JSON_BYTES} bytes, found {size} for "
            f"{len(manifest['row_order'])} rows; take shorter ids, or share the tasks out over several runs"
        )
    if (path / MANIFEST).exists():
        _require_same(manifest, read_json_object(path / MANIFEST), path / MANIFEST)
    elif path.exists() and any(entry.name not in (LOCK, MANIFEST + ".part") for entry in path.iterdir()):
        raise InputError(f"{path}: expected a run directory or an empty one, found files without {MANIFEST}")


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
    """InputError, naming the fields, where `wanted` is not the manifest of the run in `path`, information apart."""
    _require_same(json.loads(canonical(wanted)), read_json_object(path / MANIFEST), path / MANIFEST)


def _require_same(wanted: Manifest, found: Mapping[str, Any], where: Path) -> None:
    differing = compare_leaves(without(wanted, INFORMATION), without(found, INFORMATION)).lines("expected", "found")
    if differing:
        shown = "; ".join(differing[:4]) + (f"; and {len(differing) - 4} more" if len(differing) > 4 else "")
        raise InputError(f"{where}: expected this run's manifest, found another's ({shown}); choose --out or --fresh")


@dataclass(frozen=True)
class Run:
    """One run directory, read only."""

    path: Path
    manifest: dict[str, Any]
    rows: Mapping[str, dict[str, Any]]  # by identity (`ledger.row_key`), in the manifest's order; complete lines only
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


def _decoded(numeric: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
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
