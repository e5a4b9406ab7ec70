"""The append-only ledger `rows.jsonl`: one sealed line a row, in source order, safe against a crash at any byte."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness.canonical import seal, unseal
from experiments.harness.exits import uninterrupted
from minimodel.errors import InputError, refuse


def row_key(entry: dict[str, Any]) -> str:
    """Returns the identity of a ledger row, as in the manifest's `row_order`: its id, led by its cell or dtype.

    No two rows of a run share it. Whatever looks a row up, joins two runs or names a row uses this key.
    """
    lead = entry.get("cell", entry.get("dtype"))
    return str(entry["row"]) if lead is None else f"{lead}/{entry['row']}"


def require_distinct(keys: Sequence[str], where: str) -> None:
    """InputError where two rows share one identity."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise refuse(where, "each row once", key)
        seen.add(key)


def lock(path: Path, name: Path | None = None) -> int:
    """A handle that holds a file's lock until it is closed or its process ends; InputError, naming `name` or the file,
    when another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(f"{name or path}: expected no other writer, found a process that holds its lock") from None
    return handle


def read_ledger(path: Path, row_order: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows, and the bytes of a torn tail (0: none).

    InputError for a damaged complete line, for two rows of one identity and, where `row_order` is given, for a row that
    is not the manifest's at that place. Only the last line can be torn: a line is complete when its newline is there,
    and rows are written in order.
    """
    data = path.read_bytes() if path.exists() else b""
    complete, _, tail = data.rpartition(b"\n")
    rows = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            rows.append(unseal(line.decode("ascii")))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number}: expected an intact row, found damage ({error})") from None
        if not isinstance(rows[-1].get("row"), str):
            raise refuse(f"{path} line {number}: row", "a row's id", rows[-1].get("row"))
    keys = [row_key(row) for row in rows]
    require_distinct(keys, f"{path}: row")
    for number, key in enumerate(keys if row_order is not None else [], start=1):
        wanted = row_order[number - 1] if row_order is not None and number <= len(row_order) else None
        if key != wanted:
            expected = "the end" if wanted is None else f"row {wanted!r} (the manifest's row_order)"
            raise refuse(f"{path} line {number}", expected, key)
    return rows, len(tail)


def torn_bytes(path: Path) -> int:
    """Bytes after the last line break of a file of lines, 0 for a whole one or none."""
    return len(path.read_bytes().rpartition(b"\n")[2]) if path.exists() else 0


def drop_tail(path: Path, size: int) -> None:
    """Cuts `size` torn bytes off the end; complete rows keep theirs."""
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - size)
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """Appends one line and flushes it to disk. When that fails half-way (disk full), the half is cut off again."""
    with uninterrupted(), open(path, "ab", buffering=0) as file:
        before = file.tell()
        data = line.encode("ascii") + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(before)
            raise OSError(error.errno, error.strerror, str(path)) from None


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Appends one sealed row."""
    append_line(path, seal(row))


def write_whole(path: Path, text: str) -> None:
    """Replaces a small file at once: a reader sees the old or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
