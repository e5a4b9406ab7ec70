"""The right answer of a question as a file states it: which choice it is, or which number.

`answer` is a letter, an index from 0 or the text of a choice; where these readings name different choices it is
refused. `answer_index` and `answer_text` say which reading is meant.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from decode.text import LETTERS
from stats.answers.score import expected_answer
from stats.errors import StatsInputError

INDEX, TEXT = "answer_index", "answer_text"
EXPLICIT = (INDEX, TEXT)


def right_choice(row: Mapping[str, Any], choices: Sequence[str], field: str = "answer") -> int | str:
    """Returns the index of the right choice, or what is wrong with its statement in `row`."""
    given = [key for key in (field, *EXPLICIT) if key in row]
    if len(given) != 1:
        return f"expected one of {field}, {INDEX}, {TEXT}, found {' and '.join(given) or 'none'}"
    value, choices = row[given[0]], [text.strip() for text in choices]
    if given[0] == INDEX:
        valid = type(value) is int and 0 <= value < len(choices)
        return value if valid else f"{INDEX}: expected an index from 0 to {len(choices) - 1}, found {str(value)[:40]!r}"
    text = value.strip() if isinstance(value, str) else None
    if given[0] == TEXT:
        fault = f"{TEXT}: expected the text of one choice, found {str(value)[:40]!r}"
        return choices.index(text) if text is not None and choices.count(text) == 1 else fault
    return _one_reading(field, value, choices)


def right_number(row: Mapping[str, Any], field: str = "answer") -> tuple[str | None, str]:
    """Returns (the right number in its one spelling, ""), or (None, what is wrong with its statement in `row`)."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        found = type(value).__name__ if field in row else "no such key"
        return None, f"{field}: expected text or a number where there are no choices, found {found}"
    try:
        return expected_answer(str(value), 0), ""
    except StatsInputError as error:
        return None, f"{error}: no text could match it; give choices, or a number"


def letter_is_ambiguous(index: int, choices: Sequence[str]) -> bool:
    """Returns whether the letter of choice `index` is also the text of another choice."""
    return any(text.strip() == LETTERS[index] for i, text in enumerate(choices) if i != index)


def _one_reading(field: str, value: Any, choices: Sequence[str]) -> int | str:
    """Returns the choice that `value` names as letter, index or text, or what is wrong with it."""
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
    return f"{field}: expected a letter, an index or the text of a choice, found {str(value)[:40]!r}"
