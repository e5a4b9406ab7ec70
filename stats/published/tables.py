"""Reads the released ledgers: CSV files whose malformed cells are refused by file, line and column."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stats.errors import StatsInputError
from stats.strict_csv import parse_csv

PRECISIONS = ("bf16", "fp32")


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
        if self.text(column) not in ("true", "false"):
            raise self.malformed(column, "true or false")
        return self.cells[column] == "true"

    def flags(self, *columns: str) -> bool:
        """Whether all `columns` are true. Every one is read, so a malformed one is refused."""
        return [self.flag(column) for column in columns].count(False) == 0

    def whole(self, column: str) -> int:
        value = self.text(column)
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            raise self.malformed(column, "a whole number")
        return int(value)

    def optional_whole(self, column: str) -> int | None:
        return None if self.text(column) == "" else self.whole(column)

    def number(self, column: str) -> float:
        try:
            number = float(self.text(column))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.malformed(column, "a finite number")
        return number

    def same(self, first: str, second: str) -> bool:
        """Whether two columns hold the same digest."""
        return self.text(first) == self.text(second)

    def agree(self, column: str, derived: bool) -> bool:
        """Return `derived`. Raises StatsInputError where the row's flag `column` is another."""
        if self.flag(column) != derived:
            raise self.malformed(column, f"{str(derived).lower()} (from the row's other columns)")
        return derived

    def malformed(self, column: str, expected: str) -> StatsInputError:
        return StatsInputError(f"{self.where}, column {column}: expected {expected}, found {self.cells[column][:80]!r}")


def count(rows: Sequence[Row], column: str, derived: Callable[[Row], bool] | None = None) -> int:
    """Count the rows whose flag `column` is true. Raises StatsInputError where it is not what `derived` returns."""
    return sum(row.flag(column) if derived is None else row.agree(column, derived(row)) for row in rows)


def read_rows(path: Path, key: tuple[str, ...] = ("row_id",)) -> list[Row]:
    """Return the rows of a CSV file in file order. Raises StatsInputError for an unreadable or malformed file, a file
    without rows, and a repeated `key`.
    """
    if not path.is_file():
        raise StatsInputError(f"{path}: expected a CSV file, found {'something else' if path.exists() else 'nothing'}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StatsInputError(f"{path}: expected a readable CSV file, found {error.strerror or error}") from error
    rows = [Row(f"{path.name} line {line}", cells) for line, cells in parse_csv(data, path)]
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        identity = tuple(row.text(column) for column in key)
        if identity in seen:
            raise StatsInputError(f"{row.where}: expected each {'/'.join(key)} once, found {identity} again")
        seen.add(identity)
    if not rows:
        raise StatsInputError(f"{path}: expected at least one row, found none")
    return rows


def read_precisions(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each precision, in file order. Raises StatsInputError unless both have the same row ids."""
    rows = read_rows(path, ("precision", "row_id"))
    other = next((row for row in rows if row.text("precision") not in PRECISIONS), None)
    if other is not None:
        raise StatsInputError(f"{other.where}: expected precision bf16 or fp32, found {other.text('precision')!r}")
    split = {name: [row for row in rows if row.text("precision") == name] for name in PRECISIONS}
    low, high = ([row.text("row_id") for row in split[name]] for name in PRECISIONS)
    if low != high:
        raise StatsInputError(
            f"{path.name}: expected the same row ids in both precisions, found {len(low)} and {len(high)}"
        )
    return split
