"""Canonical JSON and digests of what is written: two runs of one thing give the same bytes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from experiments.harness.records import Row


def canonical(value: Any) -> str:
    """One line of ASCII JSON in insertion order; NaN and infinity are refused (ValueError), never written."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(row: Mapping[str, Any]) -> str:
    """The row's line, closed by `row_sha256`, the digest of the line without it."""
    return canonical({**row, "row_sha256": sha256_text(canonical(row))})


def unseal(line: str) -> Row:
    """The row of a sealed line; ValueError when any byte is not as it was written."""
    row = json.loads(line)
    if not isinstance(row, dict) or seal({k: v for k, v in row.items() if k != "row_sha256"}) != line:
        raise ValueError("its digest does not match its bytes")
    return cast(Row, row)
