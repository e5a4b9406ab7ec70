"""Partial ledgers: what the ranks of a sharded run have written, and `rows.jsonl` does not hold yet.

Rank r appends its rows, sealed as in the main ledger, to `partial/rows-r.jsonl`. A row is known by its own index, so
whoever opens the run next, with any number of ranks or none, takes every row that is there. A partial ledger is locked
while its rank lives; the directory goes when the run is finished and all of it stands in `rows.jsonl`.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.canonical import canonical
from experiments.harness.ledger import (
    append_line,
    append_row,
    drop_tail,
    lock,
    open_own,
    row_key,
    unsealed,
    whole_lines,
)
from experiments.harness.records import Row, Timing
from minimodel.errors import InputError

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
    with suppress(OSError):  # not there, or somebody's own file in it
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
