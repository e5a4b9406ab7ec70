"""One deterministic matcher for answers: which answer a text states, and whether it is the expected one.

An answer is a letter `A`... within the allowed choices, or a number; anything else is no answer (None). The rules, in
order:

1. **Explicit**: a complete `\\boxed{...}` or an "Answer:" ("Answer is:", "Final answer ="). The last one in the text
   decides, a box after or on an "Answer:" line being the later. Where no explicit statement is complete but a box was
   opened (cut by the cap), there is no answer.
2. **Letter statements** (only with choices): the last sentence that has a cue ("answer", "letter", "choice", "fits",
   "correct", "pick", ...) and a standalone capital letter decides. A letter that is ruled out ("not B", "B is wrong")
   decides nothing.
3. **Number statements**: the last sentence that has "answer" followed by a number.
4. **Bare lines**: the last, else the first line that is only a letter, a labelled choice ("C) 18") or a number.

Inside the deciding statement two different letters ("B or C", "C, not B") are no answer, and so is a letter beyond
the choices; a letter goes before a number; two different numbers, or a word that contains digits but is no number
(`1,23`), are no answer. The article "A" and the pronoun "I" are no letters. Lower-case letters count where the
statement is the letter alone ("Answer: b"). Numbers are exact rationals (`stats.numbers`): 35% = 0.35 = 7/20, and not
35; `nan` and `inf` are never numbers.

The matcher accepts any string, lone surrogates included, and takes time linear in its length. Source: the paper's
scoring section ("normalizes answer blocks, multiple-choice forms, and common mathematical formats").
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from fractions import Fraction

from stats.errors import StatsInputError
from stats.numbers import format_number, parse_number
from stats.statements import has_box, last_answer_line, last_box, lines, plain_characters, sentences, stated_letter

MAX_CHOICES = len(string.ascii_uppercase)

_CUE = re.compile(
    r"\b(?:answers?|letters?|choices?|options?|correct|right|fits?|match(?:es|ed)?|choos(?:e|es|ing)|chose|picks?|picked|"
    r"selects?|selected|go(?:es|ing)?\swith|settled?\s(?:on|for)|must\sbe|it\sis|it's|makes\sit|points?\sto|takes?)\b",
    re.IGNORECASE,
)
_ANSWER_WORD = re.compile(r"\banswers?\b", re.IGNORECASE)
_COPULA = re.compile(
    r"\b(?:answer|letter|choice|option)\s{1,3}(?:is|was|must\sbe|would\sbe|should\sbe)\b(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_LEADING_COPULA = re.compile(
    r"\W{0,6}(?:is|was|are|must be|would be|should be|comes to|equals)\b(?=[\s*:])", re.IGNORECASE
)
_LABEL = re.compile(r"[\s*_(\"]{0,6}[A-Z]\s?[).:](?:[\s*_]|\Z)")
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mathsf|bm|left|right|[()\[\]])")
_EDGES = string.whitespace + "*_`\"'()[]{}$.,:;!<>#-"
_PERCENT = re.compile(r"(?<=[0-9])\s{1,3}(?:%|\\%|percent\b|per\scent\b)", re.IGNORECASE)
_DIGIT = re.compile(r"[0-9]")
_WORD_BREAK = re.compile(r"[\s=≈()]+")


@dataclass(frozen=True)
class Scored:
    """`answer`: the stated answer in its one spelling (a letter or a number), or None; `correct`: whether it is the
    expected one.
    """

    answer: str | None
    correct: bool


def score(text: str, answer: str, choices: int) -> Scored:
    """Score the decoded content of an answer block against the expected `answer`, with `choices` allowed letters (0:
    numbers only).
    """
    stated = extract_answer(text, choices)
    return Scored(stated, stated is not None and stated == canonical(answer, choices))


def is_correct(text: str, expected: str, choices: int) -> bool:
    """Whether `text` states `expected`. False where either holds no answer."""
    return score(text, expected, choices).correct


def answers_equal(left: str, right: str) -> bool:
    """Whether two bare answers are one: the same letter or the same number. A text that is no answer equals nothing,
    itself included.
    """
    normal = canonical(left)
    return normal is not None and normal == canonical(right)


def canonical(text: str, choices: int = MAX_CHOICES) -> str | None:
    """The one spelling of a bare answer ("(c)" is C, "35%" is 0.35), or None. Idempotent."""
    _check_choices(choices)
    return _bare(plain_characters(text), choices)[1]


def check_expected(answer: str, choices: int, where: str) -> str:
    """The canonical form of a task's expected answer; raises StatsInputError, naming `where`, if no text could ever
    match it.
    """
    normal = canonical(answer, choices)
    if normal is None:
        kind = f"a letter A-{string.ascii_uppercase[choices - 1]} or a number" if choices else "a number"
        raise StatsInputError(f"{where}: expected {kind} as answer, found {answer[:80]!r}")
    return normal


def extract_answer(text: str, choices: int) -> str | None:
    """The answer that `text` states, in its one spelling, or None; `choices` is the number of allowed letters, 0 to
    26.
    """
    _check_choices(choices)
    text = plain_characters(text)
    box, line = last_box(text), last_answer_line(text)
    if box is not None and (line is None or box[0] > line[0]):
        return _content(box[1], choices)
    if line is not None:
        return _content(line[1], choices)
    if has_box(text):
        return None
    statements = sentences(text)
    for find in (_letter_statement, _number_statement):
        for statement in reversed(statements):
            decided, answer = find(statement, choices)
            if decided:
                return answer
    return _bare_lines(lines(text), choices)


def _content(content: str, choices: int) -> str | None:
    """The answer in an explicit statement's content."""
    if has_box(content):
        return None
    decided, answer = _bare(content, choices)
    if decided:
        return answer
    statement = next(iter(sentences(content)), "")
    decided, answer = _bare(statement, choices)
    if not decided and choices:
        decided, answer = stated_letter(statement, choices)
    return answer if decided else _single_number(statement)


def _letter_statement(statement: str, choices: int) -> tuple[bool, str | None]:
    if not choices or not _CUE.search(statement):
        return False, None
    decided, letter = stated_letter(statement, choices)
    if decided:
        return True, letter
    copula = _COPULA.search(statement)
    return (True, _only_letter(copula["rest"], choices)) if copula and _is_one_letter(copula["rest"]) else (False, None)


def _number_statement(statement: str, choices: int) -> tuple[bool, str | None]:
    word = _ANSWER_WORD.search(statement)
    if word is None:
        return False, None
    number = _single_number(statement[word.end() :])
    return number is not None, number


def _bare_lines(found: list[str], choices: int) -> str | None:
    for line in (found[-1], found[0]) if found else ():
        decided, answer = _bare(line, choices)
        if not decided and choices and _LABEL.match(line):
            decided, answer = stated_letter(line, choices)
        if decided:
            return answer
    return None


def _bare(text: str, choices: int) -> tuple[bool, str | None]:
    """(whether the whole of `text` is one answer, that answer)."""
    if choices and _is_one_letter(text):
        return True, _only_letter(text, choices)
    number = parse_number(text)
    return number is not None, None if number is None else format_number(number)


def _undecorated(text: str) -> str:
    return _DECORATION.sub("", text).strip(_EDGES)


def _is_one_letter(text: str) -> bool:
    bare = _undecorated(text)
    return len(bare) == 1 and bare in string.ascii_letters


def _only_letter(text: str, choices: int) -> str | None:
    letter = _undecorated(text).upper()
    return letter if letter in string.ascii_uppercase[:choices] else None


def _single_number(statement: str) -> str | None:
    """The one number among the words of `statement`; None where there is none, two different, or a malformed one."""
    copula = _LEADING_COPULA.match(statement)
    rest = statement[copula.end() :] if copula else statement
    whole = parse_number(rest)
    if whole is not None:
        return format_number(whole)
    found: Fraction | None = None
    for word in set(_WORD_BREAK.split(_PERCENT.sub("%", rest))):
        if _DIGIT.search(word):
            value = parse_number(word)
            if value is None or (found is not None and value != found):
                return None
            found = value
    return None if found is None else format_number(found)


def _check_choices(choices: int) -> None:
    if not 0 <= choices <= MAX_CHOICES:
        raise StatsInputError(f"answer matcher: expected 0 to {MAX_CHOICES} choices, found {choices}")
