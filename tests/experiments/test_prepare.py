"""Freezing question files: what is read, what moves a letter (nothing but the row itself), what is refused."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from decode import State
from experiments.prepare import __main__ as prepare
from experiments.prepare.questions import held_out, ordered, states_answer
from experiments.run.tasks import load_tasks

HEADER = ["Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
ROWS = [
    ["rec1", 'Which is "odd",\nof these?', "seven ", "two", "four", "six\n"],
    ["rec2", "What is water?\r\n\r\nChoose.", "H2O", "CO2", "O2, or so", "N2"],
    ["rec3", "Größte Zahl?", "9", "1", "2", "3"],
    ["rec4", "Smallest?", "1", "7", "8", "9"],
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(prepare.main, [str(a) for a in arguments])


def write_csv(path: Path, rows: list[list[str]] = ROWS, header: list[str] = HEADER, bom: bool = True) -> Path:
    with open(path, "w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def frozen(out: Path, name: str = "tasks.jsonl") -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (out / name).read_text().splitlines()]
    return {row["id"]: row for row in rows}


def right(row: dict[str, Any]) -> str:
    return row["choices"]["ABCDEFGH".index(row["answer"])]


def test_a_csv_with_a_mark_and_quoted_line_breaks(tmp_path):
    """Case 26."""
    result = run(write_csv(tmp_path / "q.csv"), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    rows = frozen(tmp_path / "out")
    assert list(rows) == ["rec1", "rec2", "rec3", "rec4"]
    assert rows["rec1"]["question"] == 'Which is "odd",\nof these?'
    for source in ROWS:
        assert right(rows[source[0]]) == source[2].strip()
        assert sorted(rows[source[0]]["choices"]) == sorted(text.strip() for text in source[2:])
    tasks, _ = load_tasks(tmp_path / "out" / "tasks.jsonl", None)
    assert len(tasks) == 4
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tasks"] == manifest["rows"] == 4 and manifest["fields"]["id"] == "Record ID"


def test_no_other_row_and_no_order_moves_a_letter(tmp_path):
    """Case 26."""
    run(write_csv(tmp_path / "a.csv"), "--out", tmp_path / "a")
    fewer = [[row[0], row[1], row[2], row[5], row[3], row[4]] for row in (ROWS[3], ROWS[1])]
    run(write_csv(tmp_path / "b.csv", [["new", "Q?", "x", "y", "z", "w"], *fewer], bom=False), "--out", tmp_path / "b")
    whole, part = frozen(tmp_path / "a"), frozen(tmp_path / "b")
    assert [part[row] for row in ("rec2", "rec4")] == [whole[row] for row in ("rec2", "rec4")]
    # and the id does: 40 ids do not all give one order
    assert len({ordered(f"id{i}", ("a", "b", "c", "d")) for i in range(40)}) > 10


def test_right_answers_spread_over_the_letters():
    count = [0] * 4
    for i in range(2000):
        count[ordered(f"row {i}", ("right", "x", "y", "z")).index("right")] += 1
    assert all(abs(c - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75) for c in count)


def test_the_holdout_depends_on_seed_and_ids_alone(tmp_path):
    path = write_csv(tmp_path / "q.csv")
    assert run(path, "--out", tmp_path / "h", "--holdout", 2, "--seed", 7).exit_code == 0
    tasks, rest = frozen(tmp_path / "h"), frozen(tmp_path / "h", "rest.jsonl")
    assert len(tasks) == 2 and {*tasks, *rest} == {"rec1", "rec2", "rec3", "rec4"}
    ids = [f"r{i}" for i in range(100)]
    assert held_out(ids, 10, 7) == held_out(ids[::-1], 10, 7) != held_out(ids, 10, 8)
    assert held_out(ids, 10, 7) < held_out(ids, 11, 7) and held_out(ids, None, 7) == set(ids)
    assert run(path, "--out", tmp_path / "x", "--holdout", 5).exit_code == 2


def test_json_lines_in_each_form(tmp_path, contract):
    rows = [
        {"id": 7, "question": "Q1", "choices": ["a", "b", "c"], "answer": "B", "why": "secret reason"},
        {"id": "y", "question": "Q2", "choices": ["a", "b", "c"], "answer": 2},
        {"id": "z", "question": "Q3", "choices": ["a", "b", "c"], "answer": "a"},
        {"id": "free", "question": "2 + 2?", "choices": [], "answer": 4},
    ]
    result = run(write_jsonl(tmp_path / "q.jsonl", *rows), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = frozen(tmp_path / "out")
    assert [right(found[name]) for name in ("7", "y", "z")] == ["b", "c", "a"] and found["free"]["answer"] == "4"
    assert all(set(row) == {"id", "question", "choices", "answer"} for row in found.values())
    prompt = State.prompt(contract, found["7"]["question"], found["7"]["choices"])
    assert "secret" not in contract.codec.decode(prompt.tokens)
    run(tmp_path / "q.jsonl", "--out", tmp_path / "kept", "--keep-order")
    assert frozen(tmp_path / "kept")["7"]["choices"] == ["a", "b", "c"]


def test_right_answers_that_are_ambiguous_or_unmatchable_are_listed(tmp_path):
    base = {"question": "Q", "choices": ["3", "4", "1", "2"]}
    rows = [
        {**base, "id": "text or index", "answer": "1"},
        {**base, "id": "index or text", "answer": 1},
        {**base, "id": "letter or text", "choices": ["B", "A", "C", "D"], "answer": "A"},
        {"id": "a name", "question": "Q", "answer": "Lima"},
        {"id": "a unit", "question": "Q", "answer": "80 km/h"},
        {"id": "too large", "question": "Q", "answer": "1e400"},
        {"id": "two letters", "question": "Q", "choices": ["a", "b"], "answer": "AB"},
        {"id": "nothing", "question": "Q", "choices": ["a", "b"]},
    ]
    path = write_jsonl(tmp_path / "q.jsonl", *rows)
    with open(path, "a") as file:
        file.write('{"id": "beyond", "question": "Q", "answer": 1e99999999999999999999}\n')
    result = run(path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "9 rows refused" in result.stderr and result.stderr.count("write answer_index (from 0) or answer_text") == 3
    for part in ("line 4: answer: expected a number without a unit, found 'Lima'", "line 5: ", "line 8: expected one"):
        assert part in result.stderr


def test_right_answers_in_every_other_form(tmp_path):
    base = {"question": "Q", "choices": ["3", "4", "1", "2"]}
    letters = {"question": "Q", "choices": ["B", "A", "C", "D"]}
    (tmp_path / "q.jsonl").write_text('{"id": "exact", "question": "Q", "answer": 0.12345678901234567890}\n')
    rows = [
        {**base, "id": "index", "answer_index": 1},
        {**base, "id": "text", "answer_text": "1"},
        {**base, "id": "same", "choices": ["0", "1", "2"], "answer": 1},
        {**letters, "id": "letter", "answer_index": 0},
        {"id": "gsm8k", "question": "Q", "answer": "<<6*12=72>>72.\n#### 72"},
        {"id": "decimal", "question": "Q", "answer": 3.5},
        {"id": "exponent", "question": "Q", "answer": 1e22},
    ]
    with open(tmp_path / "q.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    result = run(tmp_path / "q.jsonl", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    tasks = {task.id: task for task in load_tasks(tmp_path / "out" / "tasks.jsonl", None)[0]}
    chosen = {name: task.choices["ABCD".index(task.answer)] for name, task in tasks.items() if task.choices}
    assert chosen == {"index": "4", "text": "1", "same": "1", "letter": "B"}
    assert {name: task.answer for name, task in tasks.items() if not task.choices} == {
        "exact": "0.1234567890123456789",
        "gsm8k": "72",
        "decimal": "3.5",
        "exponent": "1" + "0" * 22,
    }


def test_other_field_names(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", {"key": "k", "text": "Q", "good": "g", "bad": ["x", "y"], "id": "unused"})
    names = ["--id", "key", "--question", "text", "--correct", "good", "--incorrect", "bad"]
    assert run(path, "--out", tmp_path / "out", *names).exit_code == 0
    assert right(frozen(tmp_path / "out")["k"]) == "g"
    result = run(path, "--out", tmp_path / "no", "--id", "missing", *names[2:])
    assert result.exit_code == 2 and "'missing'" in result.stderr and not (tmp_path / "no").exists()


def test_every_offending_row_is_listed_and_nothing_written(tmp_path):
    good = {"id": "1", "question": "Q", "choices": ["a", "b"], "answer": "A"}
    rows = [
        good,
        good,
        {**good, "id": "2", "answer": "E"},
        {**good, "id": "3", "choices": ["a", "a"]},
        {**good, "id": ""},
    ]
    result = run(write_jsonl(tmp_path / "q.jsonl", *rows), "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "4 rows refused" in result.stderr
    for part in ("line 2", "twice", "line 3", "'E'", "line 4", "line 5"):
        assert part in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["\ufeff", "a,b\n1", '"open', "[1]\n", "{}\n", "\x00\n"])
def test_files_that_are_no_questions(tmp_path, text):
    for suffix in ("csv", "jsonl"):
        (tmp_path / f"q.{suffix}").write_text(text, encoding="utf-8")
        result = run(tmp_path / f"q.{suffix}", "--out", tmp_path / "out")
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, (suffix, result.output)


def test_a_question_that_states_its_answer_is_refused(tmp_path):
    row = {
        "id": "1",
        "question": "Pick.\nCorrect answer: the moon.",
        "correct": "The Moon",
        "incorrect": ["Sun", "Mars"],
    }
    result = run(write_jsonl(tmp_path / "q.jsonl", row), "--out", tmp_path / "out")
    assert result.exit_code == 2 and "states its answer" in result.stderr
    assert states_answer("Answer: (C)", "C", "x") and states_answer("**The answer is: C**", "C", "x")
    assert not states_answer("Answer: with the letter", "C", "x") and not states_answer("What is the answer?", "C", "x")


def test_the_bundled_questions_and_their_answers(tmp_path):
    assert run("--out", tmp_path / "out").exit_code == 0
    rows = frozen(tmp_path / "out")
    assert len(rows) == 24 and all(len(row["choices"]) == 4 for row in rows.values())
    pairs = {"A": "T", "T": "A", "C": "G", "G": "C"}
    computed = {
        "throw-return": f"{2 * 14.7 / 9.8:.1f} s",
        "parallel-resistors": f"{12 / (1 / (1 / 6 + 1 / 3) + 4):.1f} A",
        "half-lives": f"{80 * 0.5 ** (24 / 8):.0f} mg",
        "ph-ratio": f"The first has {10.0**-3 / 10.0**-5:.0f} times that of the second",
        "propane-oxygen": f"{2 * (3 + 8 / 4):.0f} mol",
        "thin-lens": f"{1 / (1 / 10 - 1 / 15):.0f} cm behind the lens, twice as large",
        "gas-heating": f"{2 * 450 / 300:.1f} L",
        "reverse-complement": f"5'-{''.join(pairs[base] for base in reversed('ATGCCA'))}-3'",
        "metaphase-chromatids": f"{2 * 12}",
        "third-law": f"{math.sqrt(4**3):.0f} Earth years",
        "sound-wavelength": f"{340 / 850:.2f} m",
        "sticking-carts": f"{2 * 3 / (2 + 1):.0f} m/s",
        "apparent-weight": f"{600 - 200} N",
        "permanganate": f"+{4 * 2 - 1}",
        "sodium-hydroxide": f"{0.250 * 0.40 * 40:.1f} g",
        "capacitor-charge": f"{5 * 12} µC",
    }
    assert {name: right(rows[name]) for name in computed} == computed
    explained = [json.loads(line)["explanation"] for line in prepare.BUNDLED.read_text("utf-8").splitlines()]
    assert all(text and text not in (tmp_path / "out" / "tasks.jsonl").read_text() for text in explained)


def test_two_preparations_write_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        run("--out", tmp_path / name, "--holdout", 10)
    for file in ("tasks.jsonl", "rest.jsonl", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert run("--out", tmp_path / "a").exit_code == 2
