"""Canonical JSON, its files, and its comparison leaf by leaf.

The ledger `rows.jsonl` is append-only and safe against a crash at any byte: one sealed line per row, in source order.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from experiments.run.exits import uninterrupted
from experiments.run.records import Row
from minimodel.errors import InputError, refuse
from stats.endpoints import first_divergence

FULL_SEAL = re.compile(rb'"row_sha256":".{64}"\}')
SHOWN_CHARACTERS = 60
_ABSENT = object()


def canonical(value: Any) -> str:
    """Returns one line of ASCII JSON in insertion order. ValueError for NaN and infinity."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(row: Mapping[str, Any]) -> str:
    """Returns the row's line, closed by `row_sha256`, the digest of the line without it."""
    return canonical({**row, "row_sha256": sha256_text(canonical(row))})


def row_key(entry: Mapping[str, Any]) -> str:
    """Returns the identity of a ledger row, as in the manifest's `row_order`: its id, led by its cell or dtype.

    No two rows of a run share it. Whatever looks a row up, joins two runs or names a row uses this key.
    """
    lead = entry.get("cell", entry.get("dtype"))
    return str(entry["row"]) if lead is None else f"{lead}/{entry['row']}"


def require_distinct(keys: Sequence[str], where: str) -> None:
    """Raises InputError where two rows share one identity."""
    for key, count in Counter(keys).items():
        if count > 1:
            raise refuse(where, "each row once", key)


def open_own(path: Path, flags: int) -> int:
    """Returns a handle on a regular file, made where `flags` say so. InputError for a link, a pipe, a device.

    Only files of the run itself are written, locked or cut, and opening never blocks.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a link" if path.is_symlink() else "a directory" if path.is_dir() else "a pipe or device"
        raise InputError(f"{path}: expected a regular file of this run, found {kind}")
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)


def lock(path: Path, name: Path | None = None) -> int:
    """Returns a handle that holds a file's lock until it is closed or its process ends.

    InputError, naming `name` or the file, when another process holds it, or the file system has no locks.
    """
    handle = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InputError(f"{name or path}: expected no other writer, found a process that holds its lock") from None
        raise InputError(
            f"{name or path}: expected a file system with locks, found none ({error.strerror}), as on some network "
            "file systems; give --out on a local disk and copy the finished run"
        ) from None
    return handle


def read_ledger(path: Path, row_order: Sequence[str] | None = None) -> tuple[list[Row], int]:
    """Returns the rows, and the bytes of a torn tail (0: none).

    InputError for a damaged complete line, for two rows of one identity and, where `row_order` is given, for a row that
    is not the manifest's at that place. Only the last line can be torn, as rows are written in order.
    """
    lines, torn = whole_lines(path)
    rows = [unseal(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]
    keys = [row_key(row) for row in rows]
    require_distinct(keys, f"{path}: row")
    if row_order is not None and keys != list(row_order[: len(keys)]):
        at = next(i for i, key in enumerate(keys) if [key] != list(row_order[i : i + 1]))
        expected = "the end" if at >= len(row_order) else f"row {row_order[at]!r} (the manifest's row_order)"
        raise refuse(f"{path} line {at + 1}", expected, keys[at])
    return rows, torn


def unseal(line: bytes, where: str) -> Row:
    """Returns the row of a sealed line. InputError when any byte is not as it was written, and for a row without what
    every row has."""
    try:
        row = json.loads(line.decode("ascii"))
        intact = isinstance(row, dict) and seal(without(row, "row_sha256")) == line.decode("ascii")
        fault = "" if intact else "its digest does not match its bytes"
    except (ValueError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise InputError(f"{where}: expected an intact row, found damage ({fault})")
    for key, kind in (("row", str), ("passed", bool), ("gates", dict)):
        if not isinstance(row.get(key), kind):
            raise refuse(f"{where}: {key}", f"a {kind.__name__}", row.get(key))
    return cast(Row, row)


def whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Returns the complete lines of a file of JSON objects ([] without a file), and the bytes of a torn tail (0: none).

    A tail is what a crash leaves of one line: its beginning, zeros where a disk lost power, and perhaps a line break
    that an editor or the next program added. InputError for other text, which is not the rest of a line and is not cut,
    and for a pipe or a device.
    """
    if not path.exists() and not path.is_symlink():
        return [], 0
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError(f"{path}: expected a regular file, found a pipe or device")
        complete, _, tail = file.read().rpartition(b"\n")
    lines = complete.split(b"\n") if complete else []
    if tail.strip(b"\0") and not tail.startswith(b"{"):
        raise InputError(f"{path}: expected lines of JSON, found {len(tail)} bytes of other text at its end")
    if not tail and lines and lines[-1].startswith(b"{") and not FULL_SEAL.search(lines[-1]):
        try:
            json.loads(lines[-1])
        except (ValueError, RecursionError):  # the beginning of a line, and a line break behind it
            tail = lines.pop() + b"\n"
    return lines, len(tail)


def drop_tail(path: Path, size: int) -> None:
    """Cuts `size` torn bytes off the end; complete rows keep theirs."""
    with open(open_own(path, os.O_RDWR), "r+b") as file:
        file.truncate(os.fstat(file.fileno()).st_size - size)
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """Appends one line and flushes it to disk. When that fails half-way (disk full), the half is cut off again."""
    with uninterrupted(), open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        data = line.encode("ascii") + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(before)
            raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, text: str) -> None:
    """Replaces a small file at once: a reader sees the old or the new one, never a part.

    A lone surrogate, as a path that is not UTF-8 brings it in, is written as its escape.
    """
    part = path.with_name(path.name + ".part")
    try:
        handle = open_own(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Returns an object without some of its keys."""
    return {key: inner for key, inner in value.items() if key not in keys}


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Returns {path: value} of every leaf. A list of plain values is one leaf, and so is an empty object."""
    children: list[tuple[str, Any]]
    if isinstance(value, dict) and value:
        children = [(f"{at}.{key}" if at else str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, dict | list) for child in value):
        children = [(f"{at}[{index}]", child) for index, child in enumerate(value)]
    else:
        return {at: value}
    return {path: leaf for where, child in children for path, leaf in leaves(child, where).items()}


@dataclass(frozen=True)
class LeafPair:
    """One leaf of two nested values."""

    path: str
    left: Any  # _ABSENT where only the right side has the leaf
    right: Any  # _ABSENT where only the left side has the leaf

    def line(self, left: str, right: str) -> str:
        """Returns 'PATH: LEFT 1, RIGHT 2'. Two lists are shown by their lengths and the first entry that differs."""
        mine, theirs = self.left, self.right
        if not isinstance(mine, list) or not isinstance(theirs, list):
            return f"{self.path}: {left} {_short(mine)}, {right} {_short(theirs)}"
        lengths, at = f"{self.path}: {left} {len(mine)} entries, {right} {len(theirs)}", first_unequal(mine, theirs)
        if at is None or at >= min(len(mine), len(theirs)):
            return lengths
        return f"{lengths}; entry {at}: {left} {_short(mine[at])}, {right} {_short(theirs[at])}"


@dataclass(frozen=True)
class LeafComparison:
    """Two nested values compared."""

    shared: list[LeafPair]  # leaves that both sides have
    differing: list[LeafPair]  # shared leaves with other values or other types
    one_sided: list[LeafPair]  # leaves of one side alone

    @property
    def equal(self) -> bool:
        return not self.differing and not self.one_sided

    def lines(self, left: str, right: str) -> list[str]:
        """Returns one line per difference, the sides named `left` and `right`."""
        return [difference.line(left, right) for difference in (*self.differing, *self.one_sided)]


def compare_leaves(left: Any, right: Any, at: str = "") -> LeafComparison:
    """Compares leaf by leaf. Equal means the same canonical JSON: 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    mine, theirs = leaves(left, at), leaves(right, at)
    pairs = [LeafPair(path, mine.get(path, _ABSENT), theirs.get(path, _ABSENT)) for path in {**mine, **theirs}]
    shared = [pair for pair in pairs if pair.left is not _ABSENT and pair.right is not _ABSENT]
    differing = [pair for pair in shared if canonical(pair.left) != canonical(pair.right)]
    one_sided = [pair for pair in pairs if pair.left is _ABSENT or pair.right is _ABSENT]
    return LeafComparison(shared, differing, one_sided)


def first_unequal(left: list[Any], right: list[Any]) -> int | None:
    """Returns the first index at which two lists differ: the shorter one's length where it is the other's start."""
    return first_divergence([canonical(one) for one in left], [canonical(one) for one in right])


def _short(value: Any) -> str:
    text = "nothing" if value is _ABSENT else canonical(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
