"""Freezing question files: what is read, what moves a letter (nothing but the row itself), what is refused."""

import csv
import json
import math

import pytest

from decode import State
from experiments.prepare import __main__ as prepare
from experiments.prepare.__main__ import held_out, ordered, states_answer
from experiments.run.tasks import load_tasks
from tests.experiments.runs import call, manifest_of, one_line
from tests.helpers import write_lines

HEADER = ["Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
ROWS = [
    ["rec1", 'Which is "odd",\nof these?', "seven ", "two", "four", "six\n"],
    ["rec2", "What is water?\r\n\r\nChoose.", "H2O", "CO2", "O2, or so", "N2"],
    ["rec3", "Größte Zahl?", "9", "1", "2", "3"],
    ["rec4", "Smallest?", "1", "7", "8", "9"],
]


def write_csv(path, rows=ROWS, bom=True):
    with open(path, "w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return path


def frozen(out, name="tasks.jsonl"):
    return {row["id"]: row for row in map(json.loads, (out / name).read_text().splitlines())}


def made(out, source, *more):
    """Runs the command, which must succeed, and returns the tasks by id."""
    result = call("prepare", source, "--out", out, *more)
    assert result.exit_code == 0, result.output
    return frozen(out)


def refused(out, source, *more):
    """The one line on stderr of a command that must write nothing."""
    line = one_line(call("prepare", source, "--out", out, *more))
    assert not out.exists()
    return line


def right(row):
    return row["choices"]["ABCDEFGH".index(row["answer"])]


def test_a_csv_with_a_mark_and_quoted_line_breaks(tmp_path):
    """Case 26."""
    rows = made(tmp_path / "out", write_csv(tmp_path / "q.csv"))
    assert list(rows) == ["rec1", "rec2", "rec3", "rec4"]
    assert rows["rec1"]["question"] == 'Which is "odd",\nof these?'
    for source in ROWS:
        assert right(rows[source[0]]) == source[2].strip()
        assert sorted(rows[source[0]]["choices"]) == sorted(text.strip() for text in source[2:])
    assert len(load_tasks(tmp_path / "out" / "tasks.jsonl", None)[0]) == 4
    manifest = manifest_of(tmp_path / "out")
    assert manifest["tasks"] == manifest["rows"] == 4 and manifest["fields"]["id"] == "Record ID"


def test_no_other_row_and_no_order_moves_a_letter(tmp_path):
    """Case 26."""
    whole = made(tmp_path / "a", write_csv(tmp_path / "a.csv"))
    fewer = [[row[0], row[1], row[2], row[5], row[3], row[4]] for row in (ROWS[3], ROWS[1])]
    other = write_csv(tmp_path / "b.csv", [["new", "Q?", "x", "y", "z", "w"], *fewer], bom=False)
    part = made(tmp_path / "b", other)
    assert [part[row] for row in ("rec2", "rec4")] == [whole[row] for row in ("rec2", "rec4")]
    # and the id does: 40 ids do not all give one order
    assert len({ordered(f"id{i}", ("a", "b", "c", "d")) for i in range(40)}) > 10


def test_right_answers_spread_over_the_letters():
    places = [ordered(f"row {i}", ("right", "x", "y", "z")).index("right") for i in range(2000)]
    assert all(abs(places.count(letter) - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75) for letter in range(4))


def test_the_holdout_depends_on_seed_and_ids_alone(tmp_path):
    path = write_csv(tmp_path / "q.csv")
    tasks = made(tmp_path / "h", path, "--holdout", 2, "--seed", 7)
    assert len(tasks) == 2 and {*tasks, *frozen(tmp_path / "h", "rest.jsonl")} == {"rec1", "rec2", "rec3", "rec4"}
    ids = [f"r{i}" for i in range(100)]
    assert held_out(ids, 10, 7) == held_out(ids[::-1], 10, 7) != held_out(ids, 10, 8)
    assert held_out(ids, 10, 7) < held_out(ids, 11, 7) and held_out(ids, None, 7) == set(ids)
    refused(tmp_path / "x", path, "--holdout", 5)


def test_json_lines_in_each_form(tmp_path, contract):
    q = {"question": "Q", "choices": ["a", "b", "c"]}
    rows = [
        {**q, "id": 7, "answer": "B", "why": "secret reason"},
        {**q, "id": "y", "answer": 2},
        {**q, "id": "z", "answer": "a"},
        {"id": "free", "question": "2 + 2?", "choices": [], "answer": 4},
    ]
    source = write_lines(tmp_path / "q.jsonl", *rows)
    found = made(tmp_path / "out", source)
    assert [right(found[name]) for name in ("7", "y", "z")] == ["b", "c", "a"] and found["free"]["answer"] == "4"
    assert all(set(row) == {"id", "question", "choices", "answer"} for row in found.values())
    prompt = State.prompt(contract, found["7"]["question"], found["7"]["choices"])
    assert "secret" not in contract.codec.decode(prompt.tokens)
    assert made(tmp_path / "kept", source, "--keep-order")["7"]["choices"] == ["a", "b", "c"]


BASE = {"question": "Q", "choices": ["3", "4", "1", "2"]}
LETTERS = {"question": "Q", "choices": ["B", "A", "C", "D"]}


def test_right_answers_that_are_ambiguous_or_unmatchable_are_listed(tmp_path):
    rows = [
        {**BASE, "id": "text or index", "answer": "1"},
        {**BASE, "id": "index or text", "answer": 1},
        {**LETTERS, "id": "letter or text", "answer": "A"},
        {"id": "a name", "question": "Q", "answer": "Lima"},
        {"id": "a unit", "question": "Q", "answer": "80 km/h"},
        {"id": "too large", "question": "Q", "answer": "1e400"},
        {"id": "two letters", "question": "Q", "choices": ["a", "b"], "answer": "AB"},
        {"id": "nothing", "question": "Q", "choices": ["a", "b"]},
        '{"id": "beyond", "question": "Q", "answer": 1e99999999999999999999}',
    ]
    line = refused(tmp_path / "out", write_lines(tmp_path / "q.jsonl", *rows))
    assert "9 rows refused" in line and line.count("write answer_index (from 0) or answer_text") == 3
    without_unit = "line 4: answer: expected a number without a unit, found 'Lima'"
    assert all(part in line for part in (without_unit, "line 5: ", "line 8: expected one of"))


def test_right_answers_in_every_other_form(tmp_path):
    rows = [
        '{"id": "exact", "question": "Q", "answer": 0.12345678901234567890}',
        {**BASE, "id": "index", "answer_index": 1},
        {**BASE, "id": "text", "answer_text": "1"},
        {**BASE, "id": "same", "choices": ["0", "1", "2"], "answer": 1},
        {**LETTERS, "id": "letter", "answer_index": 0},
        {"id": "gsm8k", "question": "Q", "answer": "<<6*12=72>>72.\n#### 72"},
        {"id": "decimal", "question": "Q", "answer": 3.5},
        {"id": "exponent", "question": "Q", "answer": 1e22},
    ]
    made(tmp_path / "out", write_lines(tmp_path / "q.jsonl", *rows))
    tasks, _ = load_tasks(tmp_path / "out" / "tasks.jsonl", None)
    found = {task.id: task.choices["ABCD".index(task.answer)] if task.choices else task.answer for task in tasks}
    numbers = {"exact": "0.1234567890123456789", "gsm8k": "72", "decimal": "3.5", "exponent": "1" + "0" * 22}
    assert found == {"index": "4", "text": "1", "same": "1", "letter": "B", **numbers}


def test_other_field_names(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", {"key": "k", "text": "Q", "good": "g", "bad": ["x", "y"], "id": "unused"})
    names = ["--id", "key", "--question", "text", "--correct", "good", "--incorrect", "bad"]
    assert right(made(tmp_path / "out", path, *names)["k"]) == "g"
    assert "'missing'" in refused(tmp_path / "no", path, "--id", "missing", *names[2:])
    both = "--correct and --incorrect: expected no --choices or --answer beside them, found one"
    assert both in refused(tmp_path / "no", path, *names, "--choices", "bad")
    path = write_lines(tmp_path / "r.jsonl", {"id": "1", "question": "Q", "correct": "g", "incorrect": []})
    assert "expected a correct and at least one incorrect choice" in refused(tmp_path / "no", path)


def test_every_offending_row_is_listed_and_nothing_written(tmp_path):
    good = {"id": "1", "question": "Q", "choices": ["a", "b"], "answer": "A"}
    wrong = {**good, "id": "2", "answer": "E"}, {**good, "id": "3", "choices": ["a", "a"]}, {**good, "id": ""}
    wrong += {**good, "choices": "ab"}, {**good, "choices": [f"c{n}" for n in range(27)], "answer": "c1"}
    wrong += ({**good, "question": "\ud800"},)
    line = refused(tmp_path / "out", write_lines(tmp_path / "q.jsonl", good, good, *wrong))
    parts = ("7 rows refused", "line 2", "twice", "line 3", "'E'", "line 4", "line 5")
    parts += ("line 6: choices: expected a list of texts", "line 7: choices: expected at most 26", "a lone surrogate")
    assert all(part in line for part in parts)


@pytest.mark.parametrize("text", ["\ufeff", "a,b\n1", '"open', "[1]\n", "{}\n", "\x00\n"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_files_that_are_no_questions(tmp_path, suffix, text):
    (tmp_path / f"q.{suffix}").write_text(text, encoding="utf-8")
    refused(tmp_path / "out", tmp_path / f"q.{suffix}")


def test_a_question_that_states_its_answer_is_refused(tmp_path):
    choices = {"correct": "The Moon", "incorrect": ["Sun", "Mars"]}
    row = {"id": "1", "question": "Pick.\nCorrect answer: the moon.", **choices}
    assert "states its answer" in refused(tmp_path / "out", write_lines(tmp_path / "q.jsonl", row))
    assert states_answer("Answer: (C)", "C", "x") and states_answer("**The answer is: C**", "C", "x")
    assert not states_answer("Answer: with the letter", "C", "x") and not states_answer("What is the answer?", "C", "x")


def test_the_bundled_questions_and_their_answers(tmp_path):
    rows = made(tmp_path / "out", prepare.BUNDLED)
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
        call("prepare", "--out", tmp_path / name, "--holdout", 10)
    for file in ("tasks.jsonl", "rest.jsonl", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    one_line(call("prepare", "--out", tmp_path / "a"))
