"""Question files: CSV or JSON lines, with named fields, into records that name the right choice by its text."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.text import LETTERS
from minimodel.errors import InputError
from minimodel.files import read_bytes

MAX_BYTES = 1 << 30
SHOWN = 12  # offending rows listed by name
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
    """One question. choices in the source's order, empty for a free answer; correct: the text of the right one."""

    id: str
    question: str
    choices: tuple[str, ...]
    correct: str


def read_records(path: Path, fields: Fields) -> tuple[list[Record], dict[str, Any]]:
    """All records, and the field names used. InputError lists every row that does not fit; none is skipped."""
    rows = list(_rows(path))
    if not rows:
        raise InputError(f"{path}: expected at least one row, found none")
    used = _resolve(fields, rows[0][1], path)
    records, faults, seen = [], [], set()
    for where, row in rows:
        record = _record(row, used)
        if isinstance(record, Record) and record.id in seen:
            record = f"id {record.id[:60]!r} appears twice"
        if isinstance(record, str):
            faults.append(f"{where}: {record}")
        else:
            seen.add(record.id)
            records.append(record)
    refuse_rows(path, faults)
    return records, used


def refuse_rows(path: Path, faults: list[str]) -> None:
    """InputError that lists the faults, if there are any."""
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise InputError(f"{path}: {len(faults)} rows refused: {'; '.join(faults[:SHOWN])}{more}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each; a byte-order mark is no part of the first name, a quoted cell may hold line breaks."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text, found {error}") from None
    if path.suffix.lower() == ".csv":
        yield from _csv_rows(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number}: expected JSON, found {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path} line {number}: expected a JSON object, found {type(row).__name__}")
        yield f"line {number}", row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    limit = csv.field_size_limit(MAX_BYTES)
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise InputError(f"{path}: expected distinct column names, found {header[:8]}")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise InputError(f"{path} line {reader.line_num}: expected {len(header)} cells, found {len(cells)}")
            yield f"line {reader.line_num}", dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: expected CSV, found {error}") from None
    finally:
        csv.field_size_limit(limit)


def _resolve(fields: Fields, first: dict[str, Any], path: Path) -> dict[str, Any]:
    """The names to read: the user's, else GPQA's where the first row has them, else the plain ones."""
    default = GPQA if GPQA["question"] in first else PLAIN
    used: dict[str, Any] = {"id": fields.id or default["id"], "question": fields.question or default["question"]}
    by_text = fields.correct or fields.incorrect or (default["correct"] in first and not fields.choices)
    if by_text and (fields.choices or fields.answer):
        raise InputError("--correct and --incorrect: expected no --choices or --answer beside them, found one")
    if by_text:
        used["correct"] = fields.correct or default["correct"]
        used["incorrect"] = list(fields.incorrect or default["incorrect"])
    else:
        used["answer"] = fields.answer or "answer"
        if fields.choices or "choices" in first:
            used["choices"] = fields.choices or "choices"
    names = [name for value in used.values() for name in (value if isinstance(value, list) else [value])]
    missing = [name for name in names if name not in first]
    if missing:
        raise InputError(f"{path}: expected the field {missing[0]!r}, found {', '.join(map(repr, list(first)[:12]))}")
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
    answer, choices = row.get(used["answer"]), row.get(used.get("choices", ""), [])
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in choices):
        return [f"{used.get('choices')}: expected a list of texts"], None
    stripped = [text.strip() for text in choices]
    if not stripped:
        if not isinstance(answer, str | int) or isinstance(answer, bool) or not str(answer).strip():
            return [f"{used['answer']}: expected an answer, found {str(answer)[:40]!r}"], None
        return [], str(answer).strip()
    named = _named_choice(stripped, answer)
    if named is None:
        return [
            f"{used['answer']}: expected a letter, an index or the text of a choice, found {str(answer)[:40]!r}"
        ], None
    return stripped, named


def _named_choice(choices: list[str], answer: Any) -> str | None:
    """The choice that a letter, an index from 0, or its own text names."""
    if type(answer) is int:
        return choices[answer] if 0 <= answer < len(choices) else None
    if isinstance(answer, str) and answer.strip() in choices:
        return answer.strip()
    if isinstance(answer, str) and answer.strip() in LETTERS[: len(choices)] and answer.strip():
        return choices[LETTERS.index(answer.strip())]
    return None
