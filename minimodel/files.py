"""Reads the small files of a checkpoint directory: bounded in size, inside the directory, each fault an InputError."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minimodel.errors import InputError

MAX_JSON_BYTES = 16 * 1024 * 1024  # a large index has 0.2 MB; parsing the worst JSON takes fifty times its bytes
BOM = b"\xef\xbb\xbf"  # UTF-8's byte-order mark, which spreadsheets and some editors write
MAX_NAME_BYTES = 255  # what file systems allow
Identity = tuple[int, int, int, int, int]  # device, inode, size, time of the last write, time of the last change


def checkpoint_directory(directory: str | Path) -> Path:
    """Returns the path as given. InputError unless it is a directory."""
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"{path}: expected a checkpoint directory, found {'a file' if path.exists() else 'nothing'}")
    return path


def inside(directory: Path, name: str) -> Path:
    """Returns the path of `name` in `directory`. InputError unless it is a plain file name and no link leads elsewhere.

    A link may lead to another file of the directory. In a snapshot of the Hugging Face cache it may also lead to the
    blobs of the same model: models--ORG--NAME/snapshots/REVISION/NAME -> ../../blobs/DIGEST.
    """
    # printable: no line break or terminal control sequence, which messages would repeat, and no lone surrogate, which
    # JSON can hold and UTF-8 cannot
    plain = isinstance(name, str) and name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")
    if not plain or not 0 < len(name.encode("utf-8")) <= MAX_NAME_BYTES:
        raise InputError(f"{directory}: expected a plain file name, found {str(name)[:120]!r}")
    path = directory / name
    try:
        resolved, home = path.resolve(strict=False), directory.resolve(strict=False)
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InputError(f"{path}: cannot be resolved ({error})") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if resolved.parent not in (home, blobs):
        raise InputError(
            f"{path}: expected a file inside its directory, found a link to {resolved}; "
            "a copy without links comes from: hf download REPOSITORY --local-dir DIR"
        )
    return path


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns the file's bytes. InputError when missing, not a regular file, unreadable or larger than `limit`."""
    try:
        require_plain_file(path)
        with open(path, "rb") as file:
            data = file.read(limit + 1)  # not by its size beforehand: the file may grow meanwhile
            if len(data) > limit:
                size = max(path.stat().st_size, len(data))
                raise InputError(f"{path}: expected at most {limit} bytes, found {size}")
            return data
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def require_plain_file(path: Path) -> None:
    """InputError unless it is a regular file: reading a FIFO would block, and a device may have no end."""
    if not path.is_file():
        found = "a directory" if path.is_dir() else "something else" if path.exists() else "nothing"
        raise InputError(f"{path}: expected a file, found {found}")


def identity(path: Path | int) -> Identity | None:
    """Returns what the system changes whenever the file (a path or an open descriptor) changes; None without a file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name with a zero byte or a lone surrogate
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def require_unchanged(path: Path, before: Identity | None) -> None:
    """InputError when the file's identity is not `before`: what was read may mix two states of it."""
    if identity(path) != before:
        raise InputError(f"{path}: expected the file that was opened, found that it changed since; start again")


def sha256_of(path: Path) -> str:
    """Returns the hex SHA-256 of a file. InputError when it cannot be read, or changes while it is read."""
    try:
        with open(path, "rb") as file:
            before = identity(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    require_unchanged(path, before)
    return digest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. ValueError for a key that stands twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:80]!r} appears twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes, where: object, parse_float: Callable[[str], Any] = float) -> Any:
    """Parses strict JSON: UTF-8, no duplicate keys, no NaN or Infinity. InputError names `where`."""
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON, found {' '.join(str(error).split())[:160]}") from None


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the object that a JSON file holds; the file may begin with a byte-order mark."""
    value = parse_json(read_bytes(path, limit).removeprefix(BOM), path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
