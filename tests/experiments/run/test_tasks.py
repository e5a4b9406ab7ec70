"""Task files: every row is checked before the first is decoded, and every offending row is listed."""

import json

import pytest

from decode.contract import Contract
from experiments.run.tasks import load_tasks, prompt_states
from minimodel.errors import InputError
from tests.tiny import TASK, write_checkpoint

GOOD = {"id": "a", "question": "Why?", "choices": ["x", "y"], "answer": "B"}


def write(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_good_rows_load_in_order_and_limit_cuts(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "id": "b"}, b"", {**GOOD, "id": "c"})
    assert [task.id for task in load_tasks(path, None)[0]] == ["a", "b", "c"]
    assert [task.id for task in load_tasks(path, 2)[0]] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "answer": "C"}, "letter from A to B"),
        ({**GOOD, "answer": "AB"}, "letter from A to B"),
        ({**GOOD, "answer": ["A"]}, "letter from A to B, found list"),
        ({k: v for k, v in GOOD.items() if k != "answer"}, "expected one of answer, answer_index, answer_text"),
        ({k: v for k, v in GOOD.items() if k != "choices"}, "exactly id, question, choices, answer, found missing key"),
        ({**GOOD, "extra": 1}, "exactly id, question, choices, answer, found unknown key 'extra'"),
        ({**GOOD, "question": ""}, "question: expected text"),
        ({**GOOD, "question": 3}, "question: expected text"),
        ({**GOOD, "choices": "xy"}, "choices: expected a list"),
        ({**GOOD, "choices": [""]}, "choices: expected a list"),
        ([1], "expected a JSON object, found list"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"id":"a","question":"\\ud800","choices":[],"answer":"4"}', "lone surrogate"),
    ],
)
def test_each_fault_is_named_with_its_line(tmp_path, row, message):
    path = write(tmp_path / "t.jsonl", {**GOOD, "id": "first"}, row)
    with pytest.raises(InputError, match=f"1 rows refused: line 2: .*{message}"):
        load_tasks(path, None)


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
    row = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    [task], _ = load_tasks(write(tmp_path / "t.jsonl", row), None)
    assert task.answer == answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": [], "answer": "Lima"}, "expected a number without a unit, found 'Lima'"),
        ({"choices": [], "answer": "80 km/h"}, "expected a number without a unit, found '80 km/h'"),
        ({"choices": [], "answer": None, "answer_text": "4"}, "answer: expected text or a number"),
        (
            {"choices": ["B", "A", "C"], "answer": "A"},
            "'A' is the text of 'A' and the letter of 'B'; write answer_index",
        ),
        ({"answer_index": 0}, "expected one of answer, answer_index, answer_text, found answer and answer_index"),
        ({"answer": None, "answer_index": 2}, "answer_index: expected an index from 0 to 1, found '2'"),
        ({"answer": None, "answer_index": True}, "answer_index: expected an index"),
        ({"answer": None, "answer_text": "z"}, "answer_text: expected the text of one choice, found 'z'"),
        ({"answer": None, "choices": ["x", "x"], "answer_text": "x"}, "answer_text: expected the text of one choice"),
    ],
)
def test_right_answers_that_nothing_names_are_refused(tmp_path, changes, message):
    row = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        load_tasks(write(tmp_path / "t.jsonl", row), None)
    assert message in str(caught.value) and "1 rows refused: line 1: " in str(caught.value)


def test_a_byte_order_mark_changes_no_task_and_other_formats_get_a_hint(tmp_path):
    plain = write(tmp_path / "t.jsonl", GOOD)
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert load_tasks(marked, None)[0] == load_tasks(plain, None)[0]
    array = tmp_path / "array.json"
    array.write_text(json.dumps([GOOD]))
    for path, hint in ((array, "jq -c '.[]' array.json"), (tmp_path / "q.csv", "python -m experiments.prepare q.csv")):
        with pytest.raises(InputError) as caught:
            load_tasks(path, None)
        assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_all_offending_rows_are_listed_even_beyond_the_limit(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, {**GOOD, "id": "b", "answer": "Z"})
    with pytest.raises(InputError, match="2 rows refused: line 2: id 'a' appears twice; line 3: answer"):
        load_tasks(path, 1)


def test_empty_and_missing_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="at least one task"):
        load_tasks(write(tmp_path / "t.jsonl"), None)
    with pytest.raises(InputError, match="found nothing"):
        load_tasks(tmp_path / "none.jsonl", None)


def test_prompts_that_may_outgrow_the_context_are_all_listed(tmp_path):
    contract = Contract.load(write_checkpoint(tmp_path / "tiny"))
    path = write(
        tmp_path / "t.jsonl",
        {"id": "long", "answer": "A", **TASK, "question": "w " * 600},
        {"id": "fine", "answer": "A", **TASK},
        {"id": "longer", "answer": "A", **TASK, "question": "w " * 900},
    )
    tasks, _ = load_tasks(path, None)
    with pytest.raises(InputError, match=r"2 rows refused: task 'long': .*; task 'longer': "):
        prompt_states(tasks, contract, 1024, path)
    assert len(prompt_states(tasks[1:2], contract, 1024, path)) == 1
