"""One reader of users' records: the same file is read, or refused, alike by every command that takes one."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from experiments import paired
from experiments.prepare import __main__ as prepare
from experiments.run.tasks import load_tasks, read_records
from minimodel.errors import InputError

ROW = {"id": "a", "question": "Why?", "choices": ["x", "y"], "answer": "B", "ok": True}


def results(path: Path, out: Path) -> dict[str, Result]:
    return {
        "prepare": CliRunner().invoke(prepare.main, [str(path), "--out", str(out)]),
        "paired": CliRunner().invoke(paired.main, [str(path), str(path), "--correct", "ok"]),
    }


def matrix_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_tasks(path, None)
    return str(caught.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
def test_records_that_every_command_reads(tmp_path: Path, mark: bytes) -> None:
    lines, table = tmp_path / "q.jsonl", tmp_path / "q.csv"
    lines.write_bytes(mark + b"\n" + json.dumps(ROW).encode() + b"\r\n")
    table.write_bytes(mark + b"\nid,question,correct,incorrect,ok\na,%b,1,z,1\n" % (b"w" * 200_000))
    for path in (lines, table):
        for command, result in results(path, tmp_path / f"out{path.suffix}").items():
            assert result.exit_code == 0, (path.name, command, result.output)
    task = {key: value for key, value in ROW.items() if key != "ok"}
    lines.write_bytes(mark + json.dumps(task).encode())
    assert [task.id for task in load_tasks(lines, None)[0]] == ["a"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("q.jsonl", b'{"id": "a", "id": "b"}', "the key 'id' appears twice"),
        ("q.jsonl", b'{"id": NaN}', "NaN is not JSON"),
        ("q.jsonl", b'{"id": "\xff"}', "expected JSON"),
        ("q.json", json.dumps([ROW], indent=1).encode(), "found a JSON array; write its members one per line"),
        ("q.tsv", b"id\tok\na\t1\n", ".tsv"),
    ],
)
def test_what_one_command_refuses_all_refuse_in_the_same_words(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    for command, result in results(path, tmp_path / "out").items():
        assert result.exit_code == 2 and says in result.stderr, (command, result.output)
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, command
    assert says in matrix_error(path)
    assert not (tmp_path / "out").exists()


def test_a_spreadsheet_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a \.csv or \.jsonl file, found \.xlsx"):
        read_records(tmp_path / "q.xlsx")
