"""The append-only ledger: torn tails, damage, full disks. Nested JSON compared: every leaf, its value and its type."""

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from experiments.run.ledger import (
    append_line,
    canonical,
    compare_leaves,
    drop_tail,
    leaves,
    lock,
    read_ledger,
    seal,
    unseal,
    without,
    write_whole,
)
from tests.helpers import refused

EVERY = {"passed": True, "gates": {"replica": True}}  # what a row must have
ROWS = [
    {"row": "a", "text": "é☃", **EVERY},
    {"row": "b", "value": 0.1, **EVERY},
    {"row": "c", "list": [1, None, True], **EVERY},
]


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row in ROWS:
        append_line(path, seal(row))
    return path


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_every_torn_tail_is_dropped_and_complete_rows_keep_their_bytes(ledger, end):
    """verifiers 803, 1376: half a record at the end, cut at any byte, perhaps with an editor's line break behind it
    (case 24)."""
    data = ledger.read_bytes()
    start = data[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(data) - len(end)):
        ledger.write_bytes(data[:cut] + end)
        rows, torn = read_ledger(ledger)
        assert [without(row, "row_sha256") for row in rows] == ROWS[:2] and torn == cut - start + len(end)
        drop_tail(ledger, torn)
        assert ledger.read_bytes() == data[:start]
    append_line(ledger, seal(ROWS[2]))
    assert ledger.read_bytes() == data
    ledger.write_bytes(data[:start] + data[:40] + b"\n" + data[start:])  # the control: half a row before a whole one
    with refused("rows.jsonl line 3", "damage"):
        read_ledger(ledger)


def test_a_tail_of_zeros_or_half_a_character_is_torn_and_other_text_is_not(ledger):
    """Case 24."""
    data, half = ledger.read_bytes(), '{"row":"d","text":"é'.encode()[:-1]
    for tail in (bytes(7), half):  # zeros, as a disk without power leaves them
        ledger.write_bytes(data + tail)
        rows, torn = read_ledger(ledger)
        assert len(rows) == 3 and torn == len(tail)
    ledger.write_bytes(data + b"notes of mine")
    with refused("rows.jsonl", "13 bytes of other text at its end"):
        read_ledger(ledger)


@pytest.mark.parametrize("key", ["row", "passed", "gates"])
def test_a_sealed_row_without_what_every_row_has_is_refused(ledger, key):
    append_line(ledger, seal({"row": "d", **EVERY}))
    read_ledger(ledger)
    append_line(ledger, seal({name: value for name, value in {"row": "e", **EVERY}.items() if name != key}))
    with refused(f"rows.jsonl line 5: {key}: expected a", "found None"):
        read_ledger(ledger)


def test_a_ledger_is_a_regular_file_of_the_run(ledger, tmp_path):
    """No link is written through, no pipe waited for, no device filled; reading follows a link to a regular file."""
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("{half a line of somebody's")
    link, pipe, dangling = tmp_path / "link.jsonl", tmp_path / "pipe.jsonl", tmp_path / "dangling"
    link.symlink_to(foreign)
    os.mkfifo(pipe)
    dangling.symlink_to("nowhere")
    for path, kind in ((link, "a link"), (pipe, "a pipe or device"), (dangling, "a link")):
        for write in (lambda p: append_line(p, seal(ROWS[0])), lambda p: drop_tail(p, 1), lock):
            with refused(str(path), "expected a regular file", kind):
                write(path)
    for path in (pipe, Path("/dev/full")):
        with refused(str(path), "a pipe or device"):
            read_ledger(path)
    assert foreign.read_text() == "{half a line of somebody's" and not (tmp_path / "nowhere").exists()
    (tmp_path / "elsewhere").symlink_to(ledger)
    assert read_ledger(tmp_path / "elsewhere") == read_ledger(ledger)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_another_writer(ledger, monkeypatch, number):
    def without(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with refused("expected a file system with locks", os.strerror(number), "--out on a local disk"):
        lock(ledger)
    monkeypatch.undo()
    held = lock(ledger)
    with refused("expected no other writer"):  # the control
        lock(ledger)
    os.close(held)


def test_a_row_whose_value_changed_with_its_digest_kept_is_refused():
    line = seal({"row": "a", "gates": {}, "passed": False}).encode()
    assert unseal(line, "here")["passed"] is False
    with refused("here: expected an intact row, found damage", "digest"):
        unseal(line.replace(b"false", b"true"), "here")


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError):
        canonical({"value": float("nan")})


def test_a_whole_file_is_replaced_at_once_and_a_half_character_written_as_its_escape(tmp_path):
    path = tmp_path / "report.md"
    write_whole(path, "old")
    write_whole(path, "checkpoint caf\udce9, é\n")
    assert path.read_text(encoding="utf-8") == "checkpoint caf\\udce9, é\n" and os.listdir(tmp_path) == ["report.md"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "folder"))):
        write_whole(tmp_path / "folder", "text")


def test_a_list_of_plain_values_and_an_empty_object_are_one_leaf():
    value = {"a": [{"b": 1}, {"b": [1, 2]}], "c": None, "d": {}, "e": []}
    assert leaves(value) == {"a[0].b": 1, "a[1].b": [1, 2], "c": None, "d": {}, "e": []}


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True), (0.0, -0.0), (0.1 + 0.2, 0.3), ("1", 1), ([], {})])
def test_types_and_last_bits_are_told_apart(left, right):
    assert compare_leaves({"x": left}, {"x": left}).equal
    (found,) = compare_leaves({"x": left}, {"x": right}).differing
    assert found.path == "x"


def test_every_difference_is_one_line_with_both_values():
    found = compare_leaves({"a": {"b": 1, "c": 2}, "e": 5}, {"a": {"b": 1, "c": 3}, "d": 4})
    assert len(found.shared) == 2 and len(found.differing) == 1 and len(found.one_sided) == 2
    lines = ["a.c: expected 2, found 3", "e: expected 5, found nothing", "d: expected nothing, found 4"]
    assert found.lines("expected", "found") == lines
    trial, whole = [f"demo-{i:03}" for i in range(4)], [f"demo-{i:03}" for i in range(200)]
    (line,) = compare_leaves(whole, trial, "row_order").lines("expected", "found")
    assert line == "row_order: expected 200 entries, found 4"
    (line,) = compare_leaves(trial, [*trial[:3], "demo-007"], "row_order").lines("expected", "found")
    assert line == 'row_order: expected 4 entries, found 4; entry 3: expected "demo-003", found "demo-007"'
