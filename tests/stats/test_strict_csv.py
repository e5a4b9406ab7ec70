"""The CSV reader: every form that spreadsheets write gives the same table, and what is no table is refused."""

import csv

import pytest

from stats.errors import StatsInputError
from stats.strict_csv import parse_csv

PLAIN = b"id,text\na,1\nb,2\n"
TABLE = [{"id": "a", "text": "1"}, {"id": "b", "text": "2"}]


@pytest.mark.parametrize(
    "data",
    [
        *(
            start + PLAIN
            for start in (b"", b"\xef\xbb\xbf", b"\n", b"  \r\n\n", b"sep=,\n", b"\xef\xbb\xbfsep=,\r\n\r\n")
        ),
        PLAIN.replace(b"\n", b"\r\n"),
        b'"id","text"\n"a","1"\n\n"b","2"',
    ],
)
def test_every_form_of_one_table(data):
    assert [cells for _, cells in parse_csv(data, "t.csv")] == TABLE


def test_cells_of_any_length_and_lines_by_number():
    limit = csv.field_size_limit()
    long = "x" * 200_000
    rows = parse_csv(f'id,text\na,"{long}\nmore"\nb,2\n'.encode(), "t.csv")
    assert rows == [(3, {"id": "a", "text": long + "\nmore"}), (4, {"id": "b", "text": "2"})]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"id\ttext\na\t1\n", "expected commas between the columns, found tabs"),
        (b"id;text\na;1\n", "expected commas between the columns, found semicolons"),
        (b"sep=;\nid;text\na;1\n", "found semicolons"),
        (b"id,id\na,1\n", "expected a header of distinct column names"),
        (b"id,text\na,1,2\n", "line 2: expected 2 cells, found 3"),
        (b"id,text\n\xff,1\n", "expected UTF-8 text"),
        ("id,text\n".encode("utf-16"), "expected UTF-8 text"),
        (b'id,text\n"a,1\n', "expected CSV"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(data, says):
    with pytest.raises(StatsInputError) as caught:
        parse_csv(data, "t.csv")
    assert says in str(caught.value) and str(caught.value).startswith("t.csv") and "\n" not in str(caught.value)


def test_no_lines_are_no_rows():
    assert parse_csv(b"", "t.csv") == parse_csv(b"\n\n", "t.csv") == parse_csv(b"id,text\n", "t.csv") == []
