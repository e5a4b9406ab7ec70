r"""Scores an answer text: which answer it states, and whether that is the expected one.

An answer is a letter `A`... within the allowed choices, or a number. The rules, in order:

1. The last **explicit statement** (`explicit`) or, after it, the last sentence that declares an answer ("The answer is
   C", "Therefore, C", "The answer is 17").
2. Without an explicit statement: the last sentence that declares a letter, else the last that hints at one ("C fits"),
   else the last that declares a number.
3. Without any of these: the last line, else the first, that is only a letter, a labelled choice ("C) 18") or a number.

A sentence after the deciding one that takes it back ("Wait, ...") leaves no answer. Two different letters ("B or C",
"C, not B"), a letter beyond the choices, two different numbers and malformed numbers (`1,23`) in the deciding statement
are no answer. A letter takes precedence over a number. Questions and hypotheses ("If the answer is B, ...") state
nothing. Numbers are exact rationals (`numbers`): 35% = 0.35 = 7/20, and not 35; `nan` and `inf` are no numbers.

The matcher accepts any string, lone surrogates included, and takes time linear in its length. Source: the paper's
scoring section ("normalizes answer blocks, multiple-choice forms, and common mathematical formats").
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from stats.answers.explicit import last_box, last_explicit, opens_box, unmarked
from stats.answers.letters import MAX_CHOICES, Stated, declared_letter, hinted_letter, lone_letter, only_letter
from stats.answers.numbers import format_number, parse_number
from stats.answers.quantity import stated_alone, stated_number
from stats.answers.text import Sentence, lines, plain_characters, sentences
from stats.errors import StatsInputError

_ANSWER_WORD = re.compile(r"\banswers?\b(?:[^:=]{0,60}?\b(?:is|was|be|equals|comes\sto)\b|(?=\W{0,6}[0-9\\$]))", re.I)
_TAKES_BACK = re.compile(
    r"\W{0,4}(?:(?:but|oh|ah|hm+|well|ok|okay)\W{1,4}){0,2}(?:wait|actually|correction|sorry|oops|hold\son|hang\son|"
    r"scratch\sthat|on\s(?:second\sthought|reflection)|my\smistake|i\smean|i\s(?:was\swrong|made\sa\smistake)|"
    r"let\sme\s(?:correct|fix|revise|rethink|reconsider)|no(?=[,.;!:-]|\s(?:wait|sorry|that)|\s*\Z)|"
    r"(?:that|this|it)(?:'s|\sis|\swas)\s(?:wrong|incorrect|not\s(?:right|correct)|off|a\smistake))\b",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"\b(?:it|that|this)(?:'s|\s(?:is|was|(?:should|must|would)\sbe))\b", re.IGNORECASE)
_CONCLUSION = re.compile(
    r"\W{0,4}(?:(?:so|therefore|thus|hence|finally|wait|no|actually|sorry|oh|hmm)\b\W{0,3}){1,3}", re.I
)
_LABEL = re.compile(r"[\s*_(\"]{0,6}[A-Z]\s?[).:](?:[\s*_]|\Z)")


@dataclass(frozen=True)
class Scored:
    """The score of one answer text."""

    answer: str | None  # the stated answer in its one spelling: a letter or a number
    correct: bool  # whether it is the expected one


def score(text: str, answer: str, choices: int) -> Scored:
    """Score the decoded content of an answer block against the expected `answer`, with `choices` allowed letters (0:
    numbers only).
    """
    stated = extract_answer(text, choices)
    return Scored(stated, stated is not None and stated == canonical(answer, choices))


def canonical(text: str, choices: int) -> str | None:
    """Return the one spelling of a bare answer ("(c)" is C, "35%" is 0.35), or None. Idempotent."""
    _check_choices(choices)
    stated = _bare(plain_characters(text), choices)
    return stated.answer if stated else None


def expected_answer(answer: str, choices: int) -> str:
    """Return the one spelling of a task's expected answer: a bare answer, or one after `####` as in GSM8K.

    Raises StatsInputError where no text could ever match it.
    """
    _check_choices(choices)
    normal = canonical(answer, choices)
    if normal is None and "####" in answer:
        explicit = last_explicit(plain_characters(answer), choices)
        normal = canonical(explicit.content, choices) if explicit and explicit.content else None
    if normal is None or (choices and normal not in string.ascii_uppercase[:choices]):
        kind = f"a letter from A to {string.ascii_uppercase[choices - 1]}" if choices else "a number without a unit"
        raise StatsInputError(f"answer: expected {kind}, found {answer[:80]!r}")
    return normal


def extract_answer(text: str, choices: int) -> str | None:
    """Return the answer that `text` states, in its one spelling, or None. `choices` is the number of allowed letters, 0
    to 26.
    """
    _check_choices(choices)
    text = plain_characters(text)
    explicit = last_explicit(text, choices)
    if explicit is None:
        return _last_statement(sentences(text), choices, text)
    stated = _content(explicit.content, choices)
    later = sentences(text[explicit.end :])
    kinds = [_declared_letter] if stated.answer in set(string.ascii_uppercase) else [_declared_letter, _declared_number]
    for declared in kinds:
        for i in reversed(range(len(later))):
            correction = declared(later[i], choices)
            if correction is not None:
                return _unless_taken_back(correction, later[i + 1 :])
    return _unless_taken_back(stated, later)


def _last_statement(found: Sequence[Sentence], choices: int, text: str) -> str | None:
    for kind in (_declared_letter, _hinted_letter, _declared_number):
        for i in reversed(range(len(found))):
            stated = kind(found[i], choices)
            if stated is not None:
                return _unless_taken_back(stated, found[i + 1 :])
    return _bare_lines(lines(text), choices)


def _unless_taken_back(stated: Stated, later: Sequence[Sentence]) -> str | None:
    return None if any(_TAKES_BACK.match(sentence.text) for sentence in later) else stated.answer


def _declared_letter(sentence: Sentence, choices: int) -> Stated | None:
    if not choices or sentence.asks:
        return None
    corrected = hinted_letter(sentence.text, choices) if _TAKES_BACK.match(sentence.text) else None
    return declared_letter(sentence.text, choices) or corrected


def _hinted_letter(sentence: Sentence, choices: int) -> Stated | None:
    return hinted_letter(sentence.text, choices) if choices and not sentence.asks else None


def _declared_number(sentence: Sentence, choices: int) -> Stated | None:
    """Return the number of "The answer is 17", "Therefore, 17" and "Wait, it should be 17"."""
    if sentence.asks:
        return None
    conclusion = _CONCLUSION.match(sentence.text)
    number = parse_number(sentence.text[conclusion.end() :]) if conclusion else None
    if number is not None:
        return Stated(format_number(number))
    word = _ANSWER_WORD.search(sentence.text)
    if word is None and _TAKES_BACK.match(sentence.text):
        word = _CORRECTED.search(sentence.text)
    stated = stated_number(sentence.text[word.end() :]) if word else None
    return None if stated is None else Stated(stated)


def _content(content: str | None, choices: int) -> Stated:
    """Return the answer in an explicit statement's content."""
    if content is None:
        return Stated(None)
    box = last_box(content)
    if box is None and opens_box(content):
        return Stated(None)
    content = box.content or "" if box else content
    first = next((sentence.text for sentence in sentences(content)), "")
    stated = _bare(content, choices) or _bare(first, choices) or (only_letter(first, choices) if choices else None)
    return stated or Stated(stated_number(first))


def _bare_lines(found: list[str], choices: int) -> str | None:
    for line, later in ((found[-1], []), (found[0], found[1:])) if found else ():
        content = unmarked(line)
        stated = _bare(content, choices) if content is not None else None
        if stated is None and choices and _LABEL.match(line):
            stated = only_letter(line, choices)
        if stated is None and content is not None:
            number = stated_alone(content)
            stated = Stated(number) if number is not None else None
        if stated is not None:
            return None if any(map(_TAKES_BACK.match, later)) else stated.answer
    return None


def _bare(text: str, choices: int) -> Stated | None:
    """Return the answer that is the whole of `text`, if it is one."""
    letter = lone_letter(text, choices) if choices else None
    if letter is not None:
        return letter
    number = parse_number(text)
    return None if number is None else Stated(format_number(number))


def _check_choices(choices: int) -> None:
    if not 0 <= choices <= MAX_CHOICES:
        raise StatsInputError(f"answer matcher: expected 0 to {MAX_CHOICES} choices, found {choices}")
