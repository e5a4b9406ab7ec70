"""Reads CSV: UTF-8 with or without a byte-order mark, commas, one header, every row as wide as the header."""

import csv
import io

from stats.errors import StatsInputError

_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars"}


def parse_csv(data: bytes, where: object) -> list[tuple[int, dict[str, str]]]:
    """Returns (line number, cells by column name) per row; a row that spans lines has the number of its last.

    Blank lines are skipped, and so is a first line `sep=,`, which Excel writes. Cells have any length. Raises
    StatsInputError, naming `where` and the line, for anything else.
    """
    rows = _rows(data, where)
    if rows and rows[0][1] == ["sep=", ""]:
        del rows[0]
    if not rows:
        return []
    _, header = rows[0]
    if len(header) == 1:
        found = next((name for mark, name in _SEPARATORS.items() if mark in header[0]), None)
        if found is not None:
            raise StatsInputError(f"{where}: expected commas between the columns, found {found}; save it with commas")
    if len(set(header)) != len(header):
        raise StatsInputError(f"{where}: expected a header of distinct column names, found {header[:8]}")
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise StatsInputError(f"{where} line {line}: expected {len(header)} cells, found {len(cells)}")
    return [(line, dict(zip(header, cells, strict=True))) for line, cells in rows[1:]]


def _rows(data: bytes, where: object) -> list[tuple[int, list[str]]]:
    """Returns (line number, cells) per line that is not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StatsInputError(f"{where}: expected UTF-8 text, found {error}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    limit = csv.field_size_limit(len(text) + 1)  # of the whole process
    try:
        return [(reader.line_num, cells) for cells in reader if len(cells) > 1 or "".join(cells).strip()]
    except csv.Error as error:
        raise StatsInputError(f"{where} line {reader.line_num}: expected CSV, found {error}") from None
    finally:
        csv.field_size_limit(limit)
