"""The append-only ledger `rows.jsonl`: one sealed line a row, in source order, safe against a crash at any byte."""

import fcntl
import os
from pathlib import Path
from typing import Any

from experiments.harness.canonical import seal, unseal
from experiments.harness.exits import uninterrupted
from minimodel.errors import InputError


def row_key(entry: dict[str, Any]) -> str:
    """A row's name in the manifest's `row_order`: its id, led by its cell or dtype in a run of several."""
    lead = entry.get("cell", entry.get("dtype"))
    return entry["row"] if lead is None else f"{lead}/{entry['row']}"


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


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the bytes of a torn tail (0: none). InputError names a damaged complete line.

    Only the last line can be torn: a line is complete when its newline is there, and rows are written in order.
    """
    data = path.read_bytes() if path.exists() else b""
    complete, _, tail = data.rpartition(b"\n")
    rows = []
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            rows.append(unseal(line.decode("ascii")))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number}: expected an intact row, found damage ({error})") from None
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
