"""The one reader of a user's records: JSON lines, or CSV where the file's name ends in .csv."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from minimodel.errors import InputError
from minimodel.files import BOM, parse_json, read_bytes
from stats.strict_csv import parse_csv

MAX_BYTES = 1 << 30
SHOWN = 12  # offending rows listed in a message


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields (line number, record) per record; in place of a malformed line's record, what is wrong with it.

    InputError or StatsInputError for a file that is neither CSV nor JSON lines as a whole.
    """
    if path.suffix.lower() in (".tsv", ".tab", ".xlsx", ".xls", ".parquet"):
        raise InputError(f"{path}: expected a .csv or .jsonl file, found {path.suffix}; save it as CSV with commas")
    data = read_bytes(path, MAX_BYTES)
    return iter(parse_csv(data, path)) if path.suffix.lower() == ".csv" else json_lines(data, path)


def json_lines(data: bytes, path: Path, max_line: int = MAX_BYTES) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields (line number, object) per line that is not blank; in place of a malformed line's object, its fault.

    A byte-order mark may begin the file. Numbers with a point or an exponent are Decimal, exact as written. InputError
    for a file that is one JSON array.
    """
    data = data.removeprefix(BOM)
    if data.lstrip()[:1] == b"[":
        raise InputError(
            f"{path}: expected one JSON object per line, found a JSON array; write its members one per line: "
            f"jq -c '.[]' {path.name}"
        )
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield number, _object(line, max_line)


def refuse_rows(path: Path, faults: list[str]) -> None:
    """InputError that lists the faults, if there are any."""
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise InputError(f"{path}: {len(faults)} rows refused: {'; '.join(faults[:SHOWN])}{more}")


def _object(line: bytes, max_line: int) -> dict[str, Any] | str:
    if len(line) > max_line:
        return f"expected at most {max_line} bytes, found {len(line)}"
    try:
        value = parse_json(line, "row", _exact)
    except InputError as error:
        return str(error)
    return value if isinstance(value, dict) else f"expected a JSON object, found {type(value).__name__}"


def _exact(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        raise ValueError(f"the number {text[:40]}, beyond any range") from None
