"""Strict reading of the released ledgers: CSV files whose every cell is taken at its word or refused by name."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stats.errors import StatsInputError

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Row:
    """One CSV line; every access names the file and line where a cell is missing or malformed."""

    where: str
    cells: dict[str, str]

    def text(self, column: str) -> str:
        if column not in self.cells:
            raise StatsInputError(f"{self.where}: expected column {column!r}, found {', '.join(self.cells)[:200]}")
        return self.cells[column]

    def flag(self, column: str) -> bool:
        value = self.text(column)
        if value not in _BOOLEANS:
            raise self._malformed(column, "true or false", value)
        return _BOOLEANS[value]

    def flags(self, *columns: str) -> bool:
        """Whether every one of `columns` is true; each is read, so that a malformed one is found."""
        return [self.flag(column) for column in columns].count(False) == 0

    def whole(self, column: str) -> int:
        value = self.text(column)
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            raise self._malformed(column, "a whole number", value)
        return int(value)

    def optional_whole(self, column: str) -> int | None:
        return None if self.text(column) == "" else self.whole(column)

    def number(self, column: str) -> float:
        value = self.text(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self._malformed(column, "a finite number", value)
        return number

    def same(self, *columns: str) -> bool:
        """Whether the first two of `columns` hold the same digest."""
        first, second = columns
        return self.text(first) == self.text(second)

    def agree(self, column: str, derived: bool) -> bool:
        """`derived`, after checking that the row's own flag `column` says the same."""
        if self.flag(column) != derived:
            raise self._malformed(column, f"{str(derived).lower()} (from the row's other columns)", self.text(column))
        return derived

    def _malformed(self, column: str, expected: str, found: str) -> StatsInputError:
        return StatsInputError(f"{self.where}, column {column}: expected {expected}, found {found[:80]!r}")


def read_rows(path: Path, key: tuple[str, ...] = ("row_id",)) -> list[Row]:
    """The rows of a CSV file in file order. Raises StatsInputError for a missing or undecodable file, a line of another
    width, a repeated column or a repeated `key`."""
    rows: list[Row] = []
    seen: set[tuple[str, ...]] = set()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if not header or len(set(header)) != len(header):
                raise StatsInputError(f"{path}: expected a header of distinct column names, found {header[:5]}")
            for cells in reader:
                where = f"{path.name} line {reader.line_num}"
                if len(cells) != len(header):
                    raise StatsInputError(f"{where}: expected {len(header)} cells, found {len(cells)}")
                row = Row(where, dict(zip(header, cells, strict=True)))
                identity = tuple(row.text(column) for column in key)
                if identity in seen:
                    raise StatsInputError(f"{where}: expected each {'/'.join(key)} once, found {identity} again")
                seen.add(identity)
                rows.append(row)
    except OSError as error:
        raise StatsInputError(f"{path}: expected a readable CSV file, found {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise StatsInputError(f"{path}: expected UTF-8 CSV, found {error}") from error
    if not rows:
        raise StatsInputError(f"{path}: expected at least one row, found none")
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; NaN and infinity are refused."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)
    except OSError as error:
        raise StatsInputError(f"{path}: expected a readable JSON file, found {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StatsInputError(f"{path}: expected a JSON object, found {error}") from error
    if not isinstance(value, dict):
        raise StatsInputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the constant {name}")
