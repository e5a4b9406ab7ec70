"""The append-only ledger: torn tails, damage, full disks."""

import errno
import os

import pytest

from experiments.harness.canonical import canonical, seal, unseal
from experiments.harness.ledger import append_row, drop_tail, read_ledger, write_whole
from minimodel.errors import InputError

ROWS = [{"row": "a", "text": "é☃"}, {"row": "b", "value": 0.1}, {"row": "c", "list": [1, None, True]}]


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row in ROWS:
        append_row(path, row)
    return path


def test_rows_come_back_as_written(ledger):
    rows, torn = read_ledger(ledger)
    assert [{k: v for k, v in row.items() if k != "row_sha256"} for row in rows] == ROWS
    assert torn == 0


def test_every_torn_tail_is_dropped_and_complete_rows_keep_their_bytes(ledger):
    """verifiers 803, 1376: half a record at the end, cut at any byte."""
    data = ledger.read_bytes()
    start = data[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(data)):
        ledger.write_bytes(data[:cut])
        rows, torn = read_ledger(ledger)
        assert [row["row"] for row in rows] == ["a", "b"]
        assert torn == cut - start
        drop_tail(ledger, torn)
        assert ledger.read_bytes() == data[:start]


def test_a_tail_cut_inside_a_multibyte_character_is_a_torn_tail(ledger):
    with open(ledger, "ab") as file:
        file.write('{"row":"d","text":"é'.encode()[:-1])
    rows, torn = read_ledger(ledger)
    assert len(rows) == 3
    assert torn == len('{"row":"d","text":"é'.encode()) - 1


@pytest.mark.parametrize("line", [0, 1, 2])
def test_one_flipped_byte_in_a_complete_line_is_named_and_refused(ledger, line):
    data = bytearray(ledger.read_bytes())
    starts = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for offset in (2, 9, 40):
        broken = bytearray(data)
        broken[starts[line] + offset] ^= 1
        ledger.write_bytes(broken)
        with pytest.raises(InputError, match=rf"rows\.jsonl line {line + 1}: "):
            read_ledger(ledger)


def test_a_row_whose_value_changed_with_its_digest_kept_is_refused():
    line = seal({"row": "a", "passed": False})
    assert unseal(line)["passed"] is False
    with pytest.raises(ValueError, match="digest"):
        unseal(line.replace("false", "true"))


def test_a_full_disk_leaves_complete_rows_and_names_the_file(ledger, monkeypatch):
    before = ledger.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        append_row(ledger, {"row": "d"})
    assert caught.value.filename == str(ledger)
    monkeypatch.undo()
    assert ledger.read_bytes() == before
    append_row(ledger, {"row": "d"})
    assert [row["row"] for row in read_ledger(ledger)[0]] == ["a", "b", "c", "d"]


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError):
        canonical({"value": float("nan")})


def test_a_whole_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["summary.json"]
