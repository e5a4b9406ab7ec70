"""Finds the one number that a statement states: "17 coins", "x = 5", "3 + 4 = 7", "7 (2+5)", "5°C", "1.5 million".

A statement is parts joined by "=" or "≈". A part states a number if it holds exactly one number, no operator and no
word that changes a number's value. Beside another part, arithmetic ("3 + 4") states nothing. All parts that state a
number must state the same one. Anything else is no number, since a wrong number is worse than none.
"""

import re
from fractions import Fraction

from stats.answers.numbers import format_number, parse_number
from stats.answers.text import MAX_SENTENCE
from stats.answers.words import CHANGE_NUMBER, NUMBERED, SCALES, VARIABLES

_COPULA = re.compile(r"\W{0,6}(?:is|was|are|must be|would be|should be|comes to|equals)\b(?=[\s*:])", re.IGNORECASE)
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_LATEX_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s?\{([^{}0-9]*)\}(?:\s?\^\s?\{?-?[0-9]\}?)?")
_LATEX_SPACING = re.compile(r"\\(?:[()\[\],;:! ]|quad\b)|~")
_PERCENT = re.compile(r"(?<=[0-9])\s{1,3}(?:%|\\%|percent\b|per\scent\b)", re.IGNORECASE)
_DEGREES = re.compile(r"(?<=[0-9])\s?(?:°|\^\s?\{?\\circ\}?)\s?[CFK]?(?![\w^])")
_EQUALS = re.compile(r"=|≈|\\approx\b")
_REMARK = re.compile(r"(?<=[^\s(])\s{1,3}\(([^()]*)\)")
_DIGIT = re.compile(r"[0-9]")
_ARITHMETIC = re.compile(r"[-+*/^×·÷√A-Za-z]")
_AND = re.compile(r"[,;]\s|\b(?:and|or|but)\b", re.IGNORECASE)
_BOUND = re.compile(r"\b(?:than|at\s(?:least|most)|between|up\sto|under|above|below|exceeds?|out\sof)\b|n't\b", re.I)
_WORD = re.compile(r"-?[0-9]+\s[0-9]+/[0-9]+(?!\S)|\S+")  # "3 1/2" is one word
_OPENING, _CLOSING = "\"'`*_([{", ".,:;!?\"'`*_)]}"
_OPERATORS = frozenset("+*/^×·÷<>≤≥±√")


def stated_number(statement: str) -> str | None:
    """Return the number that `statement` states, in its one spelling; None where there is none, more than one, or a
    malformed one.
    """
    if len(statement) > MAX_SENTENCE:
        return None
    whole = parse_number(statement)
    value = whole if whole is not None else _all_parts(_readable(statement))
    return None if value is None else format_number(value)


def stated_alone(line: str) -> str | None:
    """Return the number that `line` states if the line has no words: "3+4=7", "x = 5", but not "17 coins"."""
    words = re.findall(r"(?<!\\)\b[^\W\d_]{2,}", line) if len(line) <= MAX_SENTENCE else [""]
    return stated_number(line) if all(word.lower() in SCALES for word in words) else None


def _readable(statement: str) -> str:
    """Return the statement without its copula, its reason, LaTeX units and degree signs."""
    copula = _COPULA.match(statement)
    rest = statement[copula.end() :] if copula else statement
    reason = _REASON.search(rest)
    if reason and _DIGIT.search(rest, 0, reason.start()):
        rest = rest[: reason.start()]
    return _PERCENT.sub("%", _DEGREES.sub(" ", _LATEX_SPACING.sub(" ", _LATEX_UNIT.sub(r" \1 ", rest))))


def _all_parts(statement: str) -> Fraction | None:
    parts = _EQUALS.split(statement)
    values = {_part(part) for part in parts if _DIGIT.search(part) and not (len(parts) > 1 and _is_arithmetic(part))}
    return values.pop() if len(values) == 1 else None


def _is_arithmetic(part: str) -> bool:
    """Whether `part` is an expression such as "3 + 4" or "2x", and one expression only."""
    if _part(part) is not None or _AND.search(part):
        return False
    return any(word in _OPERATORS or (_DIGIT.search(word) and _ARITHMETIC.search(word)) for word in part.split())


def _part(part: str) -> Fraction | None:
    """Return the one number of a part, or None."""
    whole = parse_number(part)
    if whole is not None:
        return whole
    for remark in _REMARK.findall(part):  # "7 (2+5)": a remark must not state another number
        inner = _words_number(remark)
        if inner is not None and inner != _words_number(_REMARK.sub(" ", part)):
            return None
    return _words_number(_REMARK.sub(" ", part))


def _words_number(part: str) -> Fraction | None:
    if _BOUND.search(part):
        return None
    raw = _WORD.findall(part)
    words = [word.lstrip(_OPENING).rstrip(_CLOSING) or word for word in raw]
    values, i = set(), 0
    while i < len(words):
        word = words[i]
        if _DIGIT.search(word):
            named = i > 0 and (words[i - 1].lower() in NUMBERED or words[i - 1] == "-")
            whole = parse_number(raw[i])
            value = None if named else whole if whole is not None else parse_number(word)
            if value is None:
                return None
            while i + 1 < len(words) and words[i + 1].lower() in SCALES:
                i += 1
                value *= SCALES[words[i].lower()]
            values.add(value)
        elif word.lower() in CHANGE_NUMBER or word in VARIABLES or word in _OPERATORS or "\\" in word or "√" in word:
            return None
        i += 1
    return values.pop() if len(values) == 1 else None
