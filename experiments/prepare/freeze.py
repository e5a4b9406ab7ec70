"""From records to frozen tasks: the order of the choices, the holdout, and a look for answers inside questions."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.text import LETTERS
from experiments.prepare.sources import Record
from experiments.run.ledger import canonical
from experiments.run.tasks import INDEX, letter_is_ambiguous, refuse_rows

# a line of the question that states an answer, as a source's leftover would
STATED = re.compile(r"^[ \t>*#-]*(?:the\s+)?(?:correct\s+|right\s+)?answer\s*(?:is)?\s*[:=]\s*(.+?)\s*$", re.I | re.M)


@dataclass(frozen=True)
class Frozen:
    """One task row."""

    id: str
    question: str
    choices: tuple[str, ...]  # in their final order
    answer: str  # a letter, or a number

    def as_task(self) -> dict[str, Any]:
        """Returns the object of a task line: with `answer_index` where the letter is also another choice's text."""
        index = LETTERS.index(self.answer) if self.choices else 0
        ambiguous = bool(self.choices) and letter_is_ambiguous(index, self.choices)
        answer = {INDEX: index} if ambiguous else {"answer": self.answer}
        return {"id": self.id, "question": self.question, "choices": list(self.choices), **answer}


def freeze(records: Sequence[Record], keep_order: bool, path: Path) -> list[Frozen]:
    """All rows in source order. InputError lists the rows whose question states its answer."""
    rows, faults = [], []
    for record in records:
        choices = record.choices if keep_order else ordered(record.id, record.choices)
        answer = LETTERS[choices.index(record.correct)] if choices else record.correct
        if states_answer(record.question, answer, record.correct):
            faults.append(f"row {record.id[:60]!r}: its question states its answer")
        rows.append(Frozen(record.id, record.question, choices, answer))
    refuse_rows(path, faults)
    return rows


def ordered(row: str, choices: Sequence[str]) -> tuple[str, ...]:
    """The choices by SHA-256 of row id and choice text: neither other rows nor the source's order count."""
    return tuple(sorted(choices, key=lambda text: _digest([row, text])))


def held_out(ids: Sequence[str], count: int | None, seed: int) -> set[str]:
    """The `count` ids with the smallest SHA-256 of seed and id (all without a count): a rule that no order moves."""
    return set(sorted(ids, key=lambda row: _digest([seed, row]))[:count])


def states_answer(question: str, letter: str, text: str) -> bool:
    """A line such as 'Answer: C' or 'Correct answer: <the right choice>' stands in the question."""
    wanted = {letter.casefold(), f"({letter.casefold()})", text.casefold()}
    return any(found.strip(" .*").casefold() in wanted for found in STATED.findall(question))


def _digest(parts: list[Any]) -> bytes:
    return hashlib.sha256(canonical(parts).encode("ascii")).digest()
