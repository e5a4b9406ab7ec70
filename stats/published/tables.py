"""Reads the released ledgers: CSV files whose malformed cells are refused by file, line and column."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stats.errors import StatsInputError
from stats.strict_csv import parse_csv

PRECISIONS = ("bf16", "fp32")
# a kind of cell: what a refusal expects, the pattern of its text, and the function from text to value
Kind = tuple[str, re.Pattern[str], Callable[[str], Any]]
FLAG: Kind = ("true or false", re.compile("true|false"), "true".__eq__)
WHOLE: Kind = ("a whole number", re.compile("[0-9]{1,18}"), int)
OPTIONAL: Kind = ("a whole number", re.compile("[0-9]{0,18}"), lambda cell: int(cell) if cell else None)
NUMBER: Kind = ("a finite number", re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,2})?"), float)


@dataclass(frozen=True)
class Table:
    """Rows of one CSV file, read by column: a column has one entry per row, in order."""

    name: str  # of the file
    rows: list[tuple[int, dict[str, str]]]  # line number in the file, cells by column

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, column: str) -> list[str]:
        """Returns the cells of a column. Raises StatsInputError where the file has no such column."""
        for line, cells in self.rows[:1]:
            if column not in cells:
                found = ", ".join(cells)[:200]
                raise StatsInputError(f"{self.name} line {line}: expected column {column!r}, found {found}")
        return [cells[column] for _, cells in self.rows]

    def only(self, column: str, cell: str) -> "Table":
        """Returns the rows with this `cell`."""
        return Table(self.name, [row for row, found in zip(self.rows, self.text(column), strict=True) if found == cell])

    def read(self, column: str, kind: Kind) -> list[Any]:
        """Returns the values of a column. Raises StatsInputError for a cell of another kind."""
        expected, spelled, value = kind
        cells = self.text(column)
        for i, cell in enumerate(cells):
            if not spelled.fullmatch(cell):
                raise self.malformed(i, column, expected)
        return [value(cell) for cell in cells]

    def flags(self, *columns: str) -> list[bool]:
        """Returns whether all `columns` are true."""
        return [all(row) for row in zip(*(self.read(column, FLAG) for column in columns), strict=True)]

    def same(self, first: str, second: str) -> list[bool]:
        """Returns whether two columns hold the same text."""
        return [a == b for a, b in zip(self.text(first), self.text(second), strict=True)]

    def agree(self, column: str, derived: Sequence[bool]) -> list[bool]:
        """Returns the flags of `column`. Raises StatsInputError where one is not `derived` from the other columns."""
        found = self.flags(column)
        for i, expected in enumerate(derived):
            if found[i] != expected:
                raise self.malformed(i, column, f"{str(expected).lower()} (from the row's other columns)")
        return found

    def malformed(self, row: int, column: str, expected: str) -> StatsInputError:
        """Returns the refusal of a cell; `row` counts from 0."""
        line, cells = self.rows[row]
        return StatsInputError(
            f"{self.name} line {line}, column {column}: expected {expected}, found {cells[column][:80]!r}"
        )


def read_table(path: Path, key: tuple[str, ...] = ("row_id",)) -> Table:
    """Returns the rows of a CSV file in file order. Raises StatsInputError for a missing or malformed file, a file
    without rows, and a repeated `key`.
    """
    if not path.is_file():
        raise StatsInputError(f"{path}: expected a CSV file, found {'something else' if path.exists() else 'nothing'}")
    table = Table(path.name, parse_csv(path.read_bytes(), path))
    if not table.rows:
        raise StatsInputError(f"{path}: expected at least one row, found none")
    seen: set[tuple[str, ...]] = set()
    for (line, _), row in zip(table.rows, zip(*map(table.text, key), strict=True), strict=True):
        if row in seen:
            raise StatsInputError(f"{path.name} line {line}: expected each {'/'.join(key)} once, found {row} again")
        seen.add(row)
    return table


def read_precisions(path: Path) -> dict[str, Table]:
    """Returns the rows of each precision, in file order. Raises StatsInputError unless both have the same row ids."""
    table = read_table(path, ("precision", "row_id"))
    for line, cells in table.rows:
        if cells["precision"] not in PRECISIONS:
            found = repr(cells["precision"])
            raise StatsInputError(f"{table.name} line {line}: expected precision bf16 or fp32, found {found}")
    split = {name: table.only("precision", name) for name in PRECISIONS}
    low, high = (part.text("row_id") for part in split.values())
    if low != high:
        raise StatsInputError(
            f"{path.name}: expected the same row ids in both precisions, found {len(low)} and {len(high)}"
        )
    return split
