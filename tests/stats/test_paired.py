"""Paired statistics of two result files: the join, the numbers and the command."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stats.endpoints import compare_results
from stats.errors import StatsInputError
from tests.experiments.runs import call, one_line
from tests.helpers import write_lines


def run(left, right, *options):
    return call("paired", left, right, *options)


def test_published_rows_give_the_published_numbers(published, tmp_path):
    lines = (published / "data" / "matched_live_prefill.csv").read_text().splitlines(keepends=True)
    table = tmp_path / "bf16.csv"
    table.write_text("".join([lines[0], *reversed([line for line in lines if ",bf16," in line])]))
    left, right = tmp_path / "left.csv", tmp_path / "right.csv"
    left.write_text(table.read_text().replace("live_correct", "ok"))
    right.write_text(table.read_text().replace("prefill_correct", "ok"))
    result = run(left, right, "--id", "row_id", "--correct", "ok", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["left"]["count"], found["right"]["count"], found["n"]) == (93, 95, 200)
    assert found["bootstrap_95"] == [-3.5000000000000004, 5.5]
    assert (found["left_only"], found["right_only"], found["mcnemar_p"]) == (9, 11, 0.8238029479980469)
    assert len(found["left_only_ids"]) == 9 and len(found["right_only_ids"]) == 11


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.text(), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_file_order_moves_nothing(items, random):
    keys = list(items)
    random.shuffle(keys)  # type: ignore[attr-defined]
    straight = compare_results({k: items[k][0] for k in items}, {k: items[k][1] for k in items})
    shuffled = compare_results({k: items[k][0] for k in keys}, {k: items[k][1] for k in reversed(keys)})
    assert straight == shuffled
    assert straight["left_only_ids"] == sorted(k for k, (a, b) in items.items() if a and not b)


def test_unequal_ids_name_some_of_the_missing():
    with pytest.raises(
        StatsInputError, match=r"7 only left \('x0', 'x1', 'x2', 'x3', 'x4' ...\) and 1 only right \('b'\)"
    ):
        compare_results({"a": True} | {f"x{i}": True for i in range(7)}, {"a": True, "b": False})
    with pytest.raises(StatsInputError, match="found none"):
        compare_results({}, {})


def test_jsonl_against_csv_with_every_spelling(tmp_path):
    labels = [True, 1, 1.0, "true", False, 0, 0.0, "0"]
    left = write_lines(tmp_path / "l.jsonl", *({"doc": {"id": i}, "acc": label} for i, label in enumerate(labels)))
    right = tmp_path / "r.CSV"
    cells = ["1", "TRUE", "0", "False", "0.0", "1", "1.0", "true"]
    right.write_bytes(
        b"\xef\xbb\xbf" + "".join(["doc.id,acc\r\n", *(f"{i},{c}\r\n" for i, c in enumerate(cells))]).encode()
    )
    result = run(left, right, "--id", "doc.id", "--correct", "acc", "--json")
    found = json.loads(result.stdout)
    assert found["left_only_ids"] == ["2", "3"] and found["right_only_ids"] == ["5", "6", "7"] and found["n"] == 8


def test_lines_say_each_number(tmp_path):
    left = write_lines(tmp_path / "l.jsonl", *({"id": f"q{i}", "correct": i < 3} for i in range(5)))
    right = write_lines(tmp_path / "r.jsonl", *({"id": f"q{i}", "correct": i >= 1} for i in range(5)))
    result = run(left, right)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("left accuracy") and "3/5 = 60.00%" in lines[0]
    assert lines[1].startswith("right accuracy") and "4/5 = 80.00%" in lines[1]
    assert "+20.00 points" in lines[2] and "p = 1; 1 only left, 2 only right" in lines[3]
    assert lines[4].split() == ["only", "left", "q0"] and lines[5].split() == ["only", "right", "q3", "q4"]
    seeded = run(left, right, "--seed", "1", "--json")
    assert json.loads(seeded.stdout)["bootstrap_95"] is not None


def test_ids_that_cannot_be_printed_are_escaped(tmp_path):
    left, right = (
        write_lines(tmp_path / f"{label}.jsonl", *({"id": id, "correct": label} for id in ("\ud800", "a\nb")))
        for label in (1, 0)
    )
    result = run(left, right)
    assert result.exit_code == 0 and "'\\ud800'" in result.stdout and "'a\\nb'" in result.stdout


def test_without_an_interval_the_command_says_why(tmp_path):
    equal = [{"id": str(i), "correct": True} for i in range(4)]
    other = [*equal[:3], {"id": "3", "correct": False}]
    left, right = write_lines(tmp_path / "left.jsonl", *equal), write_lines(tmp_path / "right.jsonl", *other)
    one = write_lines(tmp_path / "one.jsonl", *equal[:1])
    assert "+0.00 points, no interval: every row has the same difference" in run(left, left).stdout
    assert "-25.00 points, bootstrap 95 % [-" in run(left, right).stdout
    assert "no interval: fewer than two rows" in run(one, one).stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("csv: id,correct\nq\n", "line 2: expected 2 cells, found 1"),
        (None, "bad.jsonl"),
        ('{"id": "a", "correct": 0.5}', "line 1: expected true/false or 1/0 in field 'correct', found 0.5"),
        ('{"id": "a", "correct": null}', "found None"),
        ('{"id": "a"}', "field 'correct', found nothing"),
        ('{"correct": true}', "field 'id', found nothing"),
        ('{"id": true, "correct": true}', "field 'id', found True"),
        ('{"id": 1.5, "correct": true}', "field 'id', found 1.5"),
        ('{"id": "", "correct": true}', "field 'id', found ''"),
        ('{"id": "a", "correct": true}\n{"id": "a", "correct": true}', "found 'a' again"),
        ('{"id": "a", "correct": true}\n{"id": "b", "corr', "line 2: row: expected JSON"),
        ("1", "line 1: expected a JSON object, found int"),
        ("[" * 100_000, "expected one JSON object per line, found a JSON array"),
        ("", "found 1 only right ('q')"),
    ],
)
def test_bad_files_exit_2_in_one_line(tmp_path, content, says):
    bad = tmp_path / ("bad.csv" if content and content.startswith("csv: ") else "bad.jsonl")
    if content is not None:
        bad.write_text(content.removeprefix("csv: "))
    one_line(run(bad, write_lines(tmp_path / "good.jsonl", {"id": "q", "correct": True})), says)
