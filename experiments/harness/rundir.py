"""A run directory: lock, manifest, ledger; resuming what is there, refusing what does not fit, deleting nothing."""

import json
import os
from pathlib import Path
from typing import Any

from experiments.harness import partial
from experiments.harness.canonical import canonical, sha256_file, sha256_text
from experiments.harness.ledger import (
    append_line,
    append_row,
    drop_tail,
    lock,
    read_ledger,
    row_key,
    torn_bytes,
    write_whole,
)
from minimodel.errors import InputError
from minimodel.files import read_json_object

MANIFEST, ROWS, TIMING, SUMMARY, REPORT = "manifest.json", "rows.jsonl", "timing.jsonl", "summary.json", "report.md"
INFORMATION = "information"  # the one part of a manifest that may differ on resume: paths, commit, command


class RunDirectory:
    """One run on disk, held under a lock that dies with its holder.

    rows: those that `rows.jsonl` held when it was opened. length: those it holds now. waiting: rows by index that ranks
    of a sharded run wrote to partial ledgers, ready to be taken when all before them are there.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], fresh: bool) -> None:
        """Creates or reopens the run. InputError when another process holds it or its manifest differs."""
        self.path = path
        if fresh and path.exists():
            _set_aside(path)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path / ".lock", path)
        try:
            self._open(path, json.loads(canonical(manifest)))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, manifest: dict[str, Any]) -> None:
        if (path / MANIFEST).exists():
            _require_same(manifest, read_json_object(path / MANIFEST), path / MANIFEST)
        elif any(entry.name not in (".lock", MANIFEST + ".part") for entry in path.iterdir()):
            raise InputError(f"{path}: expected a run directory or an empty one, found files without {MANIFEST}")
        else:
            write_whole(path / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=True, allow_nan=False) + "\n")
        self.manifest = manifest
        self.rows, self.dropped = read_ledger(path / ROWS)
        order = [row_key(entry) for entry in self.rows]
        if order != list(manifest["row_order"])[: len(order)]:
            raise InputError(f"{path / ROWS}: expected rows in the manifest's order, found {order[:3]!r}...")
        if self.dropped:
            drop_tail(path / ROWS, self.dropped)
        torn = torn_bytes(path / TIMING)
        if torn:  # the next line would otherwise be glued to it
            drop_tail(path / TIMING, torn)
        self._written: list[str | None] = [row["row_sha256"] for row in self.rows]
        partial.require_unheld(path)
        self.dropped_waiting = partial.drop_torn(path)
        self.look_again()

    @property
    def length(self) -> int:
        return len(self._written)

    def look_again(self) -> None:
        """Reads what ranks have written meanwhile; none may be writing now. InputError names a damaged line."""
        self.waiting = partial.scan(self.path, list(self.manifest["row_order"]), self._written)

    def append(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        """Adds a finished row; its timing goes to a file of its own, so that two runs write one and the same ledger."""
        append_row(self.path / ROWS, row)
        self._written.append(None)
        append_line(self.path / TIMING, canonical(timing))

    def take(self, index: int) -> dict[str, Any] | None:
        """Row `index` where it is there already, from a partial ledger its line is moved to the end of `rows.jsonl`."""
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

    def written(self) -> list[dict[str, Any]]:
        """All rows, read back: what a summary is made of, so that a long run need not hold them while it decodes."""
        return read_ledger(self.path / ROWS)[0]

    def attach(self, name: str, text: str) -> None:
        """Keeps an input beside the ledger, written before the first row; InputError when other bytes stand there."""
        path = self.path / name
        if not path.exists():
            write_whole(path, text)
        elif sha256_file(path) != sha256_text(text):
            raise InputError(f"{path}: expected SHA-256 {sha256_text(text)}, found {sha256_file(path)}")

    def finish(self, summary: dict[str, Any], report: str) -> None:
        """Writes summary.json and report.md; what partial ledgers still hold stands in `rows.jsonl` by then."""
        write_whole(self.path / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=True, allow_nan=False) + "\n")
        write_whole(self.path / REPORT, report)
        partial.clear(self.path)

    def close(self) -> None:
        """Lets the lock go."""
        os.close(self._lock)


def _set_aside(path: Path) -> None:
    """Renames the old run to the next free NAME.N beside it."""
    os.close(lock(path / ".lock", path))
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    path.rename(path.with_name(f"{path.name}.{number}"))


def require_same_manifest(wanted: dict[str, Any], path: Path) -> None:
    """InputError, naming the fields, where `wanted` is not the manifest of the run in `path`, information apart."""
    _require_same(json.loads(canonical(wanted)), read_json_object(path / MANIFEST), path / MANIFEST)


def _require_same(wanted: dict[str, Any], found: dict[str, Any], where: Path) -> None:
    differing = differing_fields(
        {k: v for k, v in wanted.items() if k != INFORMATION}, {k: v for k, v in found.items() if k != INFORMATION}
    )
    if differing:
        shown = "; ".join(differing[:4]) + (f"; and {len(differing) - 4} more" if len(differing) > 4 else "")
        raise InputError(f"{where}: expected this run's manifest, found another's ({shown}); choose --out or --fresh")


def differing_fields(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Paths of the leaves that differ, each with what is wanted and what is found."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = [*wanted, *(key for key in found if key not in wanted)]
        return [
            line
            for key in keys
            for line in differing_fields(wanted.get(key), found.get(key), f"{at}.{key}" if at else str(key))
        ]
    if _records(wanted) and _records(found) and len(wanted) == len(found):  # the numeric contracts
        pairs = enumerate(zip(wanted, found))
        return [line for i, (mine, theirs) in pairs for line in differing_fields(mine, theirs, f"{at}[{i}]")]
    if wanted == found and type(wanted) is type(found):
        return []
    if isinstance(wanted, list) and isinstance(found, list):
        return [f"{at}: {_lists(wanted, found)}"]
    return [f"{at}: expected {_short(wanted)}, found {_short(found)}"]


def _lists(wanted: list[Any], found: list[Any]) -> str:
    """Two different lists by their lengths and the first place where they part, which a long one's head would hide."""
    lengths = f"expected {len(wanted)} entries, found {len(found)}"
    for index, (mine, theirs) in enumerate(zip(wanted, found)):
        if mine != theirs:
            return f"{lengths}; entry {index}: expected {_short(mine)}, found {_short(theirs)}"
    return lengths


def _records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _short(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 40 else text[:37] + "..."


def open_finished(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(manifest, rows, summary) of a finished run, read only. InputError when it is not there or not finished."""
    if not (path / MANIFEST).exists():
        raise InputError(f"{path}: expected a run directory, found {'no manifest' if path.exists() else 'nothing'}")
    manifest = read_json_object(path / MANIFEST)
    rows, torn = read_ledger(path / ROWS)
    if torn or len(rows) != len(manifest.get("row_order", [])) or not (path / SUMMARY).exists():
        raise InputError(
            f"{path}: expected a finished run, found {len(rows)} of {len(manifest.get('row_order', []))} rows"
        )
    return manifest, rows, read_json_object(path / SUMMARY)
