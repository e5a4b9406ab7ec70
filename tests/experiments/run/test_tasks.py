"""Records of users: every row is checked before the first is decoded, every offending row is listed, and the same file
is read, or refused, in the same way by every command that takes one."""

import json

import pytest

from decode.contract import Contract
from experiments.run.tasks import load_tasks, prompt_states, read_records
from tests.experiments.runs import call, one_line
from tests.helpers import refused, write_lines
from tests.tiny import TASK, write_checkpoint

GOOD = {"id": "a", "question": "Why?", "choices": ["x", "y"], "answer": "B"}


def changed(**changes):
    """The good row with changes; None takes a key out."""
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


def test_good_rows_load_in_order_and_limit_cuts(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", GOOD, {**GOOD, "id": "b"}, b"", {**GOOD, "id": "c"})
    assert [task.id for task in load_tasks(path, None)[0]] == ["a", "b", "c"]
    assert [task.id for task in load_tasks(path, 2)[0]] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(answer="C"), "letter from A to B"),
        (changed(answer="AB"), "letter from A to B"),
        (changed(answer=["A"]), "letter from A to B, found list"),
        (changed(answer=None), "expected one of answer, answer_index, answer_text"),
        (changed(choices=None), "exactly id, question, choices, answer, found missing key"),
        (changed(extra=1), "exactly id, question, choices, answer, found unknown key 'extra'"),
        (changed(question=""), "question: expected text"),
        (changed(question=3), "question: expected text"),
        (changed(choices="xy"), "choices: expected a list"),
        (changed(choices=[""]), "choices: expected a list"),
        ([1], "expected a JSON object, found list"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"id":"a","question":"\\ud800","choices":[],"answer":"4"}', "lone surrogate"),
        (changed(choices=[], answer="Lima"), "expected a number without a unit, found 'Lima'"),
        (changed(choices=[], answer="80 km/h"), "expected a number without a unit, found '80 km/h'"),
        (changed(choices=[], answer=None, answer_text="4"), "answer: expected text or a number"),
        (
            changed(choices=["B", "A", "C"], answer="A"),
            "'A' is the text of 'A' and the letter of 'B'; write answer_index",
        ),
        (changed(answer_index=0), "expected one of answer, answer_index, answer_text, found answer and answer_index"),
        (changed(answer=None, answer_index=2), "answer_index: expected an index from 0 to 1, found '2'"),
        (changed(answer=None, answer_index=True), "answer_index: expected an index"),
        (changed(answer=None, answer_text="z"), "answer_text: expected the text of one choice, found 'z'"),
        (changed(answer=None, choices=["x", "x"], answer_text="x"), "answer_text: expected the text of one choice"),
    ],
)
def test_each_fault_is_named_with_its_line(tmp_path, row, message):
    with refused("1 rows refused: line 2: ", message):
        load_tasks(write_lines(tmp_path / "t.jsonl", {**GOOD, "id": "first"}, row), None)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"choices": [], "answer": "6,400"}, "6400"),
        ({"choices": [], "answer": 3.5}, "3.5"),
        ({"choices": [], "answer": 72}, "72"),
        ({"choices": [], "answer": "<<6*12=72>>72.\n#### 72"}, "72"),
        ({"choices": ["3", "4", "1", "2"], "answer": "C"}, "C"),
        ({"choices": ["B", "A"], "answer": None, "answer_index": 0}, "A"),
        ({"choices": ["B", "A"], "answer": None, "answer_text": "A"}, "B"),
        ({"choices": ["A", "B"]}, "B"),
    ],
)
def test_right_answers_in_each_form(tmp_path, changes, answer):
    [task], _ = load_tasks(write_lines(tmp_path / "t.jsonl", changed(**changes)), None)
    assert task.answer == answer


def test_all_offending_rows_are_listed_even_beyond_the_limit(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", GOOD, GOOD, {**GOOD, "id": "b", "answer": "Z"})
    with refused("2 rows refused: line 2: id 'a' appears twice; line 3: answer"):
        load_tasks(path, 1)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [("t.jsonl", [], "at least one task"), ("none.jsonl", None, "found nothing"),
     ("q.csv", [b"id"], "python -m experiments.prepare q.csv")],
)  # fmt: skip
def test_empty_missing_and_other_files_are_refused(tmp_path, name, lines, message):
    if lines is not None:
        write_lines(tmp_path / name, *lines)
    with refused(message):
        load_tasks(tmp_path / name, None)


def test_prompts_that_may_outgrow_the_context_are_all_listed(tmp_path):
    contract = Contract.load(write_checkpoint(tmp_path / "tiny"))
    questions = {"long": "w " * 600, "fine": TASK["question"], "longer": "w " * 900}
    rows = [{"answer": "A", **TASK, "id": name, "question": question} for name, question in questions.items()]
    path = write_lines(tmp_path / "t.jsonl", *rows)
    tasks, _ = load_tasks(path, None)
    with refused("2 rows refused: task 'long': ", "; task 'longer': "):
        prompt_states(tasks, contract, 1024, path)
    assert len(prompt_states(tasks[1:2], contract, 1024, path)) == 1


def results(path, out):
    return {
        "prepare": call("prepare", path, "--out", out),
        "paired": call("paired", path, path, "--correct", "ok"),
    }


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
def test_records_that_every_command_reads(tmp_path, mark):
    lines, table = tmp_path / "q.jsonl", tmp_path / "q.csv"
    lines.write_bytes(mark + b"\n" + json.dumps({**GOOD, "ok": True}).encode() + b"\r\n")
    table.write_bytes(mark + b"\nid,question,correct,incorrect,ok\na,%b,1,z,1\n" % (b"w" * 200_000))
    for path in (lines, table):
        for command, result in results(path, tmp_path / f"out{path.suffix}").items():
            assert result.exit_code == 0, (path.name, command, result.output)
    lines.write_bytes(mark + json.dumps(GOOD).encode())
    assert [task.id for task in load_tasks(lines, None)[0]] == ["a"]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("q.jsonl", b'{"id": "a", "id": "b"}', "the key 'id' appears twice"),
        ("q.jsonl", b'{"id": NaN}', "NaN is not JSON"),
        ("q.jsonl", b'{"id": "\xff"}', "expected JSON"),
        ("q.json", json.dumps([GOOD], indent=1).encode(), "found a JSON array; write its members one per line: jq"),
        ("q.tsv", b"id\tok\na\t1\n", ".tsv"),
    ],
)
def test_what_one_command_refuses_all_refuse_in_the_same_words(tmp_path, name, data, text):
    path = tmp_path / name
    path.write_bytes(data)
    for result in results(path, tmp_path / "out").values():
        one_line(result, text)
    with refused(text):
        load_tasks(path, None)
    assert not (tmp_path / "out").exists()


def test_a_spreadsheet_is_refused_by_its_name(tmp_path):
    with refused("expected a .csv or .jsonl file, found .xlsx"):
        read_records(tmp_path / "q.xlsx")
