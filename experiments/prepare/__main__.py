"""Freezes questions into tasks: a GPQA-style CSV or any JSON lines, choices in an order by hash, a manifest.

Without SOURCE, 24 original science questions of this project. A CSV names its columns as GPQA does (Question, Correct
Answer, Incorrect Answer 1 to 3, Record ID); JSON lines hold id, question, correct and incorrect, or id, question,
choices and answer; options name other fields. An answer is a letter, an index from 0 or a text of the choices; a row
may say answer_index or answer_text instead, and must where these readings differ. Without choices it is a number. The
order of a row's choices follows from a hash of the row's id and the choice's text alone, so that adding, dropping or
moving rows moves no letter. Nothing but question and choices can reach a prompt.

Writes DIR/tasks.jsonl (the holdout, or all rows), DIR/rest.jsonl (what a holdout leaves) and DIR/manifest.json.

    python -m experiments.prepare gpqa_main.csv --holdout 200 --seed 20260728 --out tasks/gpqa
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from decode.text import LETTERS
from experiments.run import tasks
from experiments.run.exits import DONE, as_command
from experiments.run.ledger import canonical, sha256_file, sha256_text, write_whole
from experiments.run.options import PATH
from experiments.run.tasks import Task
from minimodel.errors import InputError, refuse

BUNDLED = Path(__file__).resolve().parent / "science.jsonl"
SCHEMA = "stage-replay-tasks-v1"
TASKS, REST, MANIFEST = "tasks.jsonl", "rest.jsonl", "manifest.json"
GPQA = {
    "id": "Record ID",
    "question": "Question",
    "correct": "Correct Answer",
    "incorrect": ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
}
PLAIN = {"id": "id", "question": "question", "correct": "correct", "incorrect": ("incorrect",)}
# a line of the question that states an answer, as a source's leftover would
STATED = re.compile(r"^[ \t>*#-]*(?:the\s+)?(?:correct\s+|right\s+)?answer\s*(?:is)?\s*[:=]\s*(.+?)\s*$", re.I | re.M)


def read_questions(path: Path, fields: dict[str, Any]) -> tuple[list[Task], dict[str, Any]]:
    """Returns all rows, choices in the source's order and `answer` still the right text, and the field names used.

    fields: the names that the user gave; "" and () take the defaults. InputError lists every row that does not fit;
    none is skipped.
    """
    rows = list(tasks.read_records(path))
    names = list(dict.fromkeys(key for _, row in rows if isinstance(row, dict) for key in row))
    faults = [f"line {line}: {row}" for line, row in rows if isinstance(row, str)]
    if not names:
        tasks.refuse_rows(path, faults)
        raise InputError(f"{path}: expected at least one row, found none")
    used = _resolve(fields, names, path)
    records: dict[str, Task] = {}
    for line, row in rows:
        if isinstance(row, str):
            continue
        try:
            record = _record(row, used)
            if record.id in records:
                raise InputError(f"id {record.id[:60]!r} appears twice")
            records[record.id] = record
        except InputError as error:
            faults.append(f"line {line}: {error}")
    tasks.refuse_rows(path, faults)
    return list(records.values()), used


def _resolve(fields: dict[str, Any], present: list[str], path: Path) -> dict[str, Any]:
    """Returns the names to read: the user's, else GPQA's where the rows have them, else the plain ones."""
    default = GPQA if GPQA["question"] in present else PLAIN
    used: dict[str, Any] = {name: fields[name] or default[name] for name in ("id", "question")}
    if fields["correct"] or fields["incorrect"] or (default["correct"] in present and not fields["choices"]):
        if fields["choices"] or fields["answer"]:
            raise InputError("--correct and --incorrect: expected no --choices or --answer beside them, found one")
        used["correct"] = fields["correct"] or default["correct"]
        used["incorrect"] = list(fields["incorrect"] or default["incorrect"])
    else:
        used["answer"] = fields["answer"] or "answer"
        if fields["choices"] or "choices" in present:
            used["choices"] = fields["choices"] or "choices"
    read = [name for value in used.values() for name in (value if isinstance(value, list) else [value])]
    stated = {used.get("answer")} if any(key in present for key in tasks.EXPLICIT) else set()  # another field says it
    missing = [name for name in read if name not in present and name not in stated]
    if missing:
        raise InputError(f"{path}: expected the field {missing[0]!r}, found {', '.join(map(repr, present[:12]))}")
    return used


def _record(row: dict[str, Any], used: dict[str, Any]) -> Task:
    """Returns the row, its texts stripped, as GPQA's cells end in line breaks. InputError says what is wrong."""
    name, question = row.get(used["id"]), row.get(used["question"])
    name = str(name) if type(name) is int else name
    for what, value in ((used["id"], name), (used["question"], question)):
        if not isinstance(value, str) or not value.strip():
            raise refuse(what, "text", str(value)[:40])
    choices, correct = _choices(row, used)
    if len(set(choices)) != len(choices):
        raise InputError("choices: expected different ones, found the same text twice")
    if len(choices) > len(LETTERS):
        raise InputError(f"choices: expected at most {len(LETTERS)}, found {len(choices)}")
    assert isinstance(name, str) and isinstance(question, str)
    if any(0xD800 <= ord(c) <= 0xDFFF for text in (name, question, *choices, correct) for c in text):
        raise InputError("expected Unicode text, found a lone surrogate")
    return Task(name.strip(), question.strip(), tuple(choices), correct)


def _choices(row: dict[str, Any], used: dict[str, Any]) -> tuple[list[str], str]:
    """Returns the choices and the right one's text, or none and the right number. InputError says what is wrong."""
    if "correct" in used:
        texts = [row.get(used["correct"])]
        for key in used["incorrect"]:
            texts += row[key] if isinstance(row.get(key), list) else [row.get(key)]
        found = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
        if len(texts) < 2 or len(found) < len(texts):
            raise InputError("expected a correct and at least one incorrect choice, each a text")
        return found, found[0]
    choices = row.get(used.get("choices", ""), [])
    if not isinstance(choices, list) or not all(isinstance(text, str) and text.strip() for text in choices):
        raise InputError(f"{used.get('choices')}: expected a list of texts")
    if not choices:
        number, fault = tasks.right_number(row, used["answer"])
        if number is None:
            raise InputError(fault)
        return [], number
    stripped = [text.strip() for text in choices]
    index = tasks.right_choice(row, stripped, used["answer"])
    if isinstance(index, str):
        raise InputError(index)
    return stripped, stripped[index]


def freeze(records: Sequence[Task], keep_order: bool, path: Path) -> list[Task]:
    """Returns the tasks in source order, `answer` the right choice's letter. InputError lists the rows whose question
    states its answer."""
    frozen, faults = [], []
    for record in records:
        choices = record.choices if keep_order else ordered(record.id, record.choices)
        answer = LETTERS[choices.index(record.answer)] if choices else record.answer
        if states_answer(record.question, answer, record.answer):
            faults.append(f"row {record.id[:60]!r}: its question states its answer")
        frozen.append(replace(record, choices=choices, answer=answer))
    tasks.refuse_rows(path, faults)
    return frozen


def task_line(task: Task) -> str:
    """Returns the line of a task file: with `answer_index` where the letter is also another choice's text."""
    index = LETTERS.index(task.answer) if task.choices else 0
    ambiguous = bool(task.choices) and tasks.letter_is_ambiguous(index, task.choices)
    answer = {tasks.INDEX: index} if ambiguous else {"answer": task.answer}
    return canonical({"id": task.id, "question": task.question, "choices": list(task.choices), **answer}) + "\n"


def ordered(row: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Returns the choices by SHA-256 of row id and choice text: neither other rows nor the source's order count."""
    return tuple(sorted(choices, key=lambda text: _digest([row, text])))


def held_out(ids: Sequence[str], count: int | None, seed: int) -> set[str]:
    """Returns the `count` ids with the smallest SHA-256 of seed and id, whatever their order; all without a count."""
    return set(sorted(ids, key=lambda row: _digest([seed, row]))[:count])


def states_answer(question: str, letter: str, text: str) -> bool:
    """Whether a line such as 'Answer: C' or 'Correct answer: <the right choice>' stands in the question."""
    wanted = {letter.casefold(), f"({letter.casefold()})", text.casefold()}
    return any(found.strip(" .*").casefold() in wanted for found in STATED.findall(question))


def _digest(parts: list[Any]) -> bytes:
    return hashlib.sha256(canonical(parts).encode("ascii")).digest()


def prepare(source: Path, out: Path, fields: Any, holdout: int | None, seed: int, keep_order: bool) -> dict[str, Any]:
    """Writes the three files and returns the manifest. InputError lists every offending row; nothing is skipped."""
    records, used = read_questions(source, fields)
    frozen = freeze(records, keep_order, source)
    if holdout is not None and holdout > len(frozen):
        raise InputError(f"{source}: expected at least {holdout} rows to hold out, found {len(frozen)}")
    ids = [task.id for task in frozen]
    chosen = held_out(ids, holdout, seed)
    lines, rest = ("".join(task_line(task) for task in frozen if (task.id in chosen) == held) for held in (True, False))
    kept = tasks.parse_tasks(lines.encode("ascii"), source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty directory, found something in it")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TASKS, lines)
    write_whole(out / REST, rest)
    letters = Counter(task.answer if task.choices else "free" for task in kept)
    manifest = {
        "schema": SCHEMA,
        "source": source.name,
        "source_sha256": sha256_file(source),
        "fields": used,
        "rows": len(frozen),
        "tasks": len(kept),
        "seed": seed if holdout is not None else None,
        "choice_order": "as in the source" if keep_order else "SHA-256 of row id and choice text",
        "answers": dict(sorted(letters.items())),
        "ids_sha256": sha256_text(canonical(ids)),
        "tasks_sha256": sha256_file(out / TASKS),
        "rest_sha256": sha256_file(out / REST),
    }
    write_whole(out / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=True) + "\n")
    return manifest


field = partial(click.option, default="", metavar="FIELD")


@click.command(help=__doc__)
@click.argument("source", required=False, default=BUNDLED, type=PATH)
@click.option("--out", required=True, type=PATH, metavar="DIR", help="A new directory.")
@click.option("--holdout", type=click.IntRange(min=1), default=None, metavar="N", help="Keep N rows, chosen by seed.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the holdout.")
@field("--id", help="The row's id. [default: Record ID or id]")
@field("--question", help="The question's text. [default: Question or question]")
@field("--correct", help="The right choice's text. [default: as above]")
@field("--incorrect", multiple=True, default=(), help="A wrong choice, or a list of them; may be repeated.")
@field("--choices", help="All choices as a list. [default: choices]")
@field("--answer", help="With choices: letter, index from 0, or text; else a number.")
@click.option("--keep-order", is_flag=True, help="Leave choices in the source's order (of --choices alone).")
@as_command("experiments.prepare")
def main(source: Path, out: Path, holdout: int | None, seed: int, keep_order: bool, **given: Any) -> int:
    manifest = prepare(source, out, given, holdout, seed, keep_order)
    right = ", ".join(f"{letter} {count}" for letter, count in manifest["answers"].items())
    click.echo(f"{manifest['tasks']} of {manifest['rows']} rows frozen; right answers: {right}")
    click.echo(f"{manifest['tasks_sha256']}  {TASKS}")
    click.echo(f"tasks: {out / TASKS}")
    return DONE


if __name__ == "__main__":
    main()
