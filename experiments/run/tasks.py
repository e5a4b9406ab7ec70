"""A user's records (JSON lines, or CSV where the file's name ends in .csv), and task files among them.

A task file holds JSON lines with id, question, choices and answer. Every row is checked before the first is decoded.
`answer` is a letter of the choices, or a number where there are none. `answer_index` (from 0) or `answer_text` may take
its place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from decode.contract import Contract
from decode.state import State, token_digest
from decode.text import LETTERS
from experiments.run.records import PanelRow
from minimodel.errors import InputError
from minimodel.files import BOM, parse_json, read_bytes
from stats.answers.score import expected_number
from stats.errors import StatsInputError
from stats.strict_csv import parse_csv

MAX_BYTES = 1 << 30
MAX_TASK_BYTES = 64 * 1024 * 1024  # a million short rows; read, they take about twenty times as much
MAX_LINE_BYTES = 1024 * 1024  # far beyond any context; the tokenizer would need a hundred times as much
KEYS, ANSWER, INDEX, TEXT = {"id", "question", "choices"}, "answer", "answer_index", "answer_text"
EXPLICIT = (INDEX, TEXT)
Made = TypeVar("Made")
SHOWN, SHOWN_ID = 12, 60  # offending rows listed in a message; characters of an id


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields (line number, record) per record; in place of a malformed line's record, what is wrong with it.

    InputError or StatsInputError for a file that is neither CSV nor JSON lines as a whole.
    """
    suffix = path.suffix.lower()
    if suffix in (".tsv", ".tab", ".xlsx", ".xls", ".parquet"):
        raise InputError(f"{path}: expected a .csv or .jsonl file, found {path.suffix}; save it as CSV with commas")
    data = read_bytes(path, MAX_BYTES)
    return iter(parse_csv(data, path)) if suffix == ".csv" else json_lines(data, path)


def json_lines(data: bytes, path: Path, max_line: int = MAX_BYTES) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields (line number, object) per line that is not blank; in place of a malformed line's object, its fault.

    A byte-order mark may begin the file. Numbers with a point or an exponent are Decimal, exact as written. InputError
    for a file that is one JSON array.
    """

    def exact(text: str) -> Decimal:
        try:
            return Decimal(text)
        except ArithmeticError:
            raise ValueError(f"the number {text[:40]}, beyond any range") from None

    data = data.removeprefix(BOM)
    if data.lstrip()[:1] == b"[":
        raise InputError(
            f"{path}: expected one JSON object per line, found a JSON array; write its members one per line: "
            f"jq -c '.[]' {path.name}"
        )
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(line) > max_line:
            yield number, f"expected at most {max_line} bytes, found {len(line)}"
        else:
            try:
                value = parse_json(line, "row", exact)
            except InputError as error:
                yield number, str(error)
            else:
                found = type(value).__name__
                yield number, value if isinstance(value, dict) else f"expected a JSON object, found {found}"


def refuse_rows(path: Path, faults: list[str]) -> None:
    """Raises InputError that lists the faults, if there are any."""
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise InputError(f"{path}: {len(faults)} rows refused: {'; '.join(faults[:SHOWN])}{more}")


def right_choice(row: Mapping[str, Any], choices: Sequence[str], field: str = ANSWER) -> int | str:
    """Returns the index of the right choice, or what is wrong with its statement in `row`."""
    given = [key for key in (field, *EXPLICIT) if key in row]
    if len(given) != 1:
        return f"expected one of {field}, {INDEX}, {TEXT}, found {' and '.join(given) or 'none'}"
    value, choices = row[given[0]], [text.strip() for text in choices]
    found = repr(str(value)[:40])
    if given[0] == INDEX:
        valid = type(value) is int and 0 <= value < len(choices)
        return value if valid else f"{INDEX}: expected an index from 0 to {len(choices) - 1}, found {found}"
    if given[0] == TEXT:
        valid = isinstance(value, str) and choices.count(value.strip()) == 1
        return choices.index(value.strip()) if valid else f"{TEXT}: expected the text of one choice, found {found}"
    text = str(value).strip() if type(value) in (int, str) else ""
    readings = {}
    if text in choices:
        readings["text"] = choices.index(text)
    if type(value) is str and text in list(LETTERS[: len(choices)]):
        readings["letter"] = LETTERS.index(text)
    if text.isascii() and text.isdigit() and len(text) < 3 and int(text) < len(choices):
        readings["index"] = int(text)
    if len(set(readings.values())) > 1:
        said = " and ".join(f"the {kind} of {choices[i][:40]!r}" for kind, i in readings.items())
        return f"{field}: {text!r} is {said}; write {INDEX} (from 0) or {TEXT} instead"
    if readings and (type(value) is int or set(readings) != {"index"}):
        return next(iter(readings.values()))
    return f"{field}: expected a letter, an index or the text of a choice, found {found}"


def right_number(row: Mapping[str, Any], field: str = ANSWER) -> tuple[str | None, str]:
    """Returns (the right number in its one spelling, ""), or (None, what is wrong with its statement in `row`)."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        found = type(value).__name__ if field in row else "no such key"
        return None, f"{field}: expected text or a number where there are no choices, found {found}"
    try:
        return expected_number(str(value)), ""
    except StatsInputError as error:
        return None, f"{error}: no text could match it; give choices, or a number"


def letter_is_ambiguous(index: int, choices: Sequence[str]) -> bool:
    """Returns whether the letter of choice `index` is also the text of another choice."""
    return any(text.strip() == LETTERS[index] for i, text in enumerate(choices) if i != index)


@dataclass(frozen=True)
class Prefix:
    """The tokens that a row starts from, a boundary prefix or a prompt, where no answer to it is expected."""

    id: str  # of the row
    tokens: tuple[int, ...]  # of a boundary prefix: through merge's opening delimiter

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        return token_digest(self.tokens)

    def name(self) -> PanelRow:
        """Returns what a manifest's panel keeps of it."""
        return {"row": self.id, "length": len(self), "sha256": self.sha256}


@dataclass(frozen=True)
class Task:
    """One line of a task file."""

    id: str  # of the row
    question: str
    choices: tuple[str, ...]  # empty where the answer is a number
    answer: str  # the letter of the right choice, or the number in its one spelling


def load_tasks(path: Path, limit: int | None) -> tuple[list[Task], bytes]:
    """Returns the first `limit` tasks (all without one) and the file's bytes. InputError lists every offending row."""
    if path.suffix.lower() in (".csv", ".tsv"):
        raise InputError(
            f"{path}: expected tasks as JSON lines, found {path.suffix}; make them with: "
            f"python -m experiments.prepare {path.name} --out DIR"
        )
    data = read_bytes(path, MAX_TASK_BYTES)
    return parse_tasks(data, path)[:limit], data


def parse_tasks(data: bytes, path: Path) -> list[Task]:
    """Returns all tasks of a task file's bytes. InputError lists every offending row."""
    tasks, faults = {}, []
    for number, row in json_lines(data, path, max_line=MAX_LINE_BYTES):
        task = row if isinstance(row, str) else _parse(row)
        if isinstance(task, Task) and task.id in tasks:
            task = f"id {task.id[:SHOWN_ID]!r} appears twice"
        if isinstance(task, str):
            faults.append(f"line {number}: {task}")
        else:
            tasks[task.id] = task
    refuse_rows(path, faults)
    if not tasks:
        raise InputError(f"{path}: expected at least one task, found none")
    return list(tasks.values())


def _parse(raw: dict[str, Any]) -> Task | str:
    """Returns the task, or what is wrong with it."""
    odd = [f"missing key {key!r}" for key in sorted(KEYS - set(raw))]
    odd += [f"unknown key {key[:40]!r}" for key in sorted(set(raw) - KEYS - {ANSWER, *EXPLICIT})]
    if odd:
        return f"expected exactly id, question, choices, answer, found {odd[0]}"
    for key in ("id", "question"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            found = repr(raw[key][:40]) if isinstance(raw[key], str) else type(raw[key]).__name__
            return f"{key}: expected text, found {found}"
    choices, value, letters = raw["choices"], raw.get(ANSWER), list(LETTERS)
    if (
        not isinstance(choices, list)
        or len(choices) > len(letters)
        or not all(isinstance(c, str) and c for c in choices)
    ):
        return f"choices: expected a list of at most {len(letters)} texts"
    texts = (text for text in (raw["id"], raw["question"], *choices, value) if isinstance(text, str))
    if any(0xD800 <= ord(c) <= 0xDFFF for text in texts for c in text):
        return "expected Unicode text, found a lone surrogate"
    if not choices:
        answer, fault = right_number(raw)
    elif ANSWER in raw and value not in letters[: len(choices)]:  # it holds a letter only
        found = repr(value[:40]) if isinstance(value, str) else type(value).__name__
        answer, fault = None, f"answer: expected a letter from A to {letters[len(choices) - 1]}, found {found}"
    else:
        index = right_choice(raw, choices)
        answer, fault = (None, index) if isinstance(index, str) else (letters[index], "")
    return fault if answer is None else Task(raw["id"], raw["question"], tuple(choices), answer)


def of_each_task(tasks: Sequence[Task], make: Callable[[Task], Made], path: Path) -> list[Made]:
    """Returns what `make` returns for each task. InputError lists every task for which it raises one."""
    made, faults = [], []
    for task in tasks:
        try:
            made.append(make(task))
        except InputError as error:
            faults.append(f"task {task.id[:SHOWN_ID]!r}: {error}")
    refuse_rows(path, faults)
    return made


def prompt_states(tasks: list[Task], contract: Contract, context: int, path: Path) -> list[State]:
    """Returns the prompt state of each task. InputError lists every task whose longest possible row exceeds the
    context."""

    def prompt_state(task: Task) -> State:
        state = State.prompt(contract, task.question, task.choices)
        longest = longest_row([state])
        if longest > context:
            raise InputError(f"prompt of {len(state)} tokens may reach {longest}, context {context}")
        return state

    return of_each_task(tasks, prompt_state, path)


def longest_row(states: Sequence[State]) -> int:
    """Returns the most tokens that a row from any of these prompts, or boundary prefixes, can hold."""
    longest = max(states, key=len)
    prefix = len(longest) if longest.structure.at_boundary else longest.contract.prefix_limit(len(longest))
    return prefix + longest.contract.suffix_limit()
