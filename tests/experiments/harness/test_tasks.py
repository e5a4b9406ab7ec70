"""Task files: every row is checked before the first is decoded, and every offending row is listed."""

import json

import pytest

from decode.contract import Contract
from experiments.harness.tasks import load_tasks, prompt_states
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
        ({k: v for k, v in GOOD.items() if k != "answer"}, "exactly id, question, choices, answer"),
        ({**GOOD, "extra": 1}, "exactly id"),
        ({**GOOD, "question": ""}, "question: expected text"),
        ({**GOOD, "question": 3}, "question: expected text"),
        ({**GOOD, "choices": "xy"}, "choices: expected a list"),
        ({**GOOD, "choices": [""]}, "choices: expected a list"),
        ([1], "expected an object"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"id":"a","question":"\\ud800","choices":[],"answer":"4"}', "lone surrogate"),
    ],
)
def test_each_fault_is_named_with_its_line(tmp_path, row, message):
    path = write(tmp_path / "t.jsonl", {**GOOD, "id": "first"}, row)
    with pytest.raises(InputError, match=f"1 rows refused: line 2: .*{message}"):
        load_tasks(path, None)


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
