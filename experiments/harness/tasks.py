"""Task files: JSON lines with id, question, choices and answer; every row is checked before the first is decoded."""

from dataclasses import dataclass
from pathlib import Path

from decode.contract import Contract
from decode.state import State
from decode.text import LETTERS
from minimodel.errors import InputError
from minimodel.files import parse_json, read_bytes

MAX_TASK_BYTES = 64 * 1024 * 1024  # a million short rows; read, they take about twenty times as much
MAX_LINE_BYTES = 1024 * 1024  # far beyond any context; the tokenizer would need a hundred times as much
KEYS = {"id", "question", "choices", "answer"}
SHOWN, SHOWN_ID = 12, 60  # faults listed in a message, and characters of an id


@dataclass(frozen=True)
class Task:
    """One row: `choices` may be empty for a free answer; `answer` is a letter of the choices, or the free answer."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class RowName:
    """A row of which only the name is known: its expected answer is not read, and its arms are not scored."""

    id: str


def load_tasks(path: Path, limit: int | None) -> tuple[list[Task], bytes]:
    """The first `limit` tasks (all without one) and the file's bytes. InputError lists every offending row."""
    data = read_bytes(path, MAX_TASK_BYTES)
    tasks, faults, seen = [], [], set()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        task = _parse(line)
        if isinstance(task, Task) and task.id in seen:
            task = f"id {task.id[:SHOWN_ID]!r} appears twice"
        if isinstance(task, str):
            faults.append(f"line {number}: {task}")
            continue
        seen.add(task.id)
        tasks.append(task)
    _refuse(faults, path)
    if not tasks:
        raise InputError(f"{path}: expected at least one task, found none")
    return tasks[:limit], data


def prompt_states(tasks: list[Task], contract: Contract, context: int, path: Path) -> list[State]:
    """The prompt state of each task. InputError lists every task whose longest possible row exceeds the context."""
    states, faults = [], []
    for task in tasks:
        try:
            state = State.prompt(contract, task.question, task.choices)
        except InputError as error:
            faults.append(f"task {task.id[:SHOWN_ID]!r}: {error}")
            continue
        longest = contract.prefix_limit(len(state)) + contract.suffix_limit()
        if longest > context:
            reach = f"prompt of {len(state)} tokens may reach {longest}, context {context}"
            faults.append(f"task {task.id[:SHOWN_ID]!r}: {reach}")
        states.append(state)
    _refuse(faults, path)
    return states


def _refuse(faults: list[str], path: Path) -> None:
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise InputError(f"{path}: {len(faults)} rows refused: {'; '.join(faults[:SHOWN])}{more}")


def _parse(line: bytes) -> Task | str:
    """The task, or what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        return f"expected at most {MAX_LINE_BYTES} bytes, found {len(line)}"
    try:
        raw = parse_json(line, "row")
    except InputError as error:
        return str(error)
    if not isinstance(raw, dict) or set(raw) != KEYS:
        odd = sorted(set(raw) ^ KEYS)[0][:40] if isinstance(raw, dict) else None
        found = type(raw).__name__ if odd is None else f"{'one more,' if odd in raw else 'none named'} {odd!r}"
        return f"expected an object with exactly id, question, choices, answer, found {found}"
    for key in ("id", "question", "answer"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            found = repr(raw[key][:40]) if isinstance(raw[key], str) else type(raw[key]).__name__
            return f"{key}: expected text, found {found}"
    choices = raw["choices"]
    if (
        not isinstance(choices, list)
        or len(choices) > len(LETTERS)
        or not all(isinstance(c, str) and c for c in choices)
    ):
        return f"choices: expected a list of at most {len(LETTERS)} texts"
    if any(0xD800 <= ord(c) <= 0xDFFF for text in (raw["id"], raw["question"], *choices, raw["answer"]) for c in text):
        return "expected Unicode text, found a lone surrogate"
    if choices and raw["answer"] not in LETTERS[: len(choices)]:
        return f"answer: expected a letter from A to {LETTERS[len(choices) - 1]}, found {raw['answer'][:40]!r}"
    return Task(raw["id"], raw["question"], tuple(choices), raw["answer"])
