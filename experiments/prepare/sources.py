"""Question files: CSV or JSON lines, with named fields, into records that name the right choice by its text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.text import LETTERS
from experiments.run.tasks import EXPLICIT, read_records, refuse_rows, right_choice, right_number
from minimodel.errors import InputError

GPQA = {
    "id": "Record ID",
    "question": "Question",
    "correct": "Correct Answer",
    "incorrect": ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
}
PLAIN = {"id": "id", "question": "question", "correct": "correct", "incorrect": ("incorrect",)}


@dataclass(frozen=True)
class Fields:
    """Field names the user gave; "" and () take the defaults."""

    id: str = ""
    question: str = ""
    correct: str = ""
    incorrect: tuple[str, ...] = ()
    choices: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Record:
    """One question."""

    id: str
    question: str
    choices: tuple[str, ...]  # in the source's order; empty where the answer is a number
    correct: str  # the text of the right choice, or the number in its one spelling


def read_questions(path: Path, fields: Fields) -> tuple[list[Record], dict[str, Any]]:
    """All records, and the field names used. InputError lists every row that does not fit; none is skipped."""
    rows = list(read_records(path))
    names = list(dict.fromkeys(key for _, row in rows if isinstance(row, dict) for key in row))
    faults = [f"line {line}: {row}" for line, row in rows if isinstance(row, str)]
    if not names:
        refuse_rows(path, faults)
        raise InputError(f"{path}: expected at least one row, found none")
    used = _resolve(fields, names, path)
    records, seen = [], set()
    for line, row in rows:
        record = row if isinstance(row, str) else _record(row, used)
        if isinstance(record, Record) and record.id in seen:
            record = f"id {record.id[:60]!r} appears twice"
        if isinstance(record, Record):
            seen.add(record.id)
            records.append(record)
        elif isinstance(row, dict):
            faults.append(f"line {line}: {record}")
    refuse_rows(path, faults)
    return records, used


def _resolve(fields: Fields, present: list[str], path: Path) -> dict[str, Any]:
    """Returns the names to read: the user's, else GPQA's where the rows have them, else the plain ones."""
    default = GPQA if GPQA["question"] in present else PLAIN
    used: dict[str, Any] = {"id": fields.id or default["id"], "question": fields.question or default["question"]}
    by_text = fields.correct or fields.incorrect or (default["correct"] in present and not fields.choices)
    if by_text and (fields.choices or fields.answer):
        raise InputError("--correct and --incorrect: expected no --choices or --answer beside them, found one")
    if by_text:
        used["correct"] = fields.correct or default["correct"]
        used["incorrect"] = list(fields.incorrect or default["incorrect"])
    else:
        used["answer"] = fields.answer or "answer"
        if fields.choices or "choices" in present:
            used["choices"] = fields.choices or "choices"
    read = [name for value in used.values() for name in (value if isinstance(value, list) else [value])]
    stated = "answer" in used and any(key in present for key in EXPLICIT)
    missing = [name for name in read if name not in present and not (stated and name == used["answer"])]
    if missing:
        raise InputError(f"{path}: expected the field {missing[0]!r}, found {', '.join(map(repr, present[:12]))}")
    return used


def _record(row: dict[str, Any], used: dict[str, Any]) -> Record | str:
    """The record, or what is wrong with it. Text is stripped at both ends: GPQA's cells end in line breaks."""
    name = row.get(used["id"])
    name = str(name) if type(name) is int else name
    question = row.get(used["question"])
    for what, value in ((used["id"], name), (used["question"], question)):
        if not isinstance(value, str) or not value.strip():
            return f"{what}: expected text, found {str(value)[:40]!r}"
    choices, correct = _choices(row, used)
    if correct is None:
        return choices[0]
    if len(set(choices)) != len(choices):
        return "choices: expected different ones, found the same text twice"
    if len(choices) > len(LETTERS):
        return f"choices: expected at most {len(LETTERS)}, found {len(choices)}"
    assert isinstance(name, str) and isinstance(question, str)
    if any(0xD800 <= ord(c) <= 0xDFFF for text in (name, question, *choices, correct) for c in text):
        return "expected Unicode text, found a lone surrogate"
    return Record(name.strip(), question.strip(), tuple(choices), correct)


def _choices(row: dict[str, Any], used: dict[str, Any]) -> tuple[list[str], str | None]:
    """(choices, the right one's text), or ([what is wrong], None)."""
    if "correct" in used:
        wrong = [
            x for key in used["incorrect"] for x in (row[key] if isinstance(row.get(key), list) else [row.get(key)])
        ]
        texts = [row.get(used["correct"]), *wrong]
        found = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
        if len(texts) < 2 or len(found) < len(texts):
            return ["expected a correct and at least one incorrect choice, each a text"], None
        return found, found[0]
    choices = row.get(used.get("choices", ""), [])
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in choices):
        return [f"{used.get('choices')}: expected a list of texts"], None
    stripped = [text.strip() for text in choices]
    if not stripped:
        number, fault = right_number(row, used["answer"])
        return ([], number) if number is not None else ([fault], None)
    index = right_choice(row, stripped, used["answer"])
    return ([index], None) if isinstance(index, str) else (stripped, stripped[index])
