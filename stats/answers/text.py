"""Splits text into lines and sentences, after mapping look-alike characters to ASCII."""

import re
from typing import NamedTuple

MAX_SENTENCE = 2_000  # characters; a longer sentence is not read, as an answer block holds 64 tokens

_LINE_END = r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"
_SENTENCE = re.compile(rf"(?s)(?P<text>.*?)(?:(?P<mark>[.!?])(?=[*_)\"'$]{{0,3}}(?:\s|\Z))|{_LINE_END}|\Z)")
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_ALPHANUMERIC = re.compile(r"\w")
_TRANSLATION: dict[int, str | None] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-"),
    **dict.fromkeys((0x00A0, 0x2009, 0x202F, 0x3000), " "),
    **dict.fromkeys((0x2018, 0x2019), "'"),
    **dict.fromkeys((0x201C, 0x201D), '"'),
    **dict.fromkeys((0x200B, 0x2060, 0xFEFF), None),
    **{ord(sign): f" {spelt}" for sign, spelt in zip("½⅓⅔¼¾", ("1/2", "1/3", "2/3", "1/4", "3/4"), strict=True)},
}


class Sentence(NamedTuple):
    """One sentence, without its closing mark."""

    text: str
    start: int  # position of its first character in the whole text
    is_question: bool  # whether it ends in a question mark


def words(text: str) -> frozenset[str]:
    """Returns the words of `text`, split at spaces."""
    return frozenset(text.split())


def before_reason(text: str, stated: re.Pattern[str]) -> str:
    """Returns `text` up to "because" or "since" where `stated` is found before it, else all of it."""
    reason = _REASON.search(text)
    return text[: reason.start()] if reason and stated.search(text, 0, reason.start()) else text


def plain_characters(text: str) -> str:
    """Returns `text` with full-width forms, minus signs, quotes and spaces in ASCII, and zero-width characters removed.

    A fixed table, applied per character: Unicode's own compatibility normalisation sorts runs of combining marks in
    quadratic time in some Python releases.
    """
    return text.translate(_TRANSLATION)


def lines(text: str) -> list[str]:
    """Returns the lines of `text` that hold a letter or digit."""
    return [line for line in re.split(_LINE_END, text) if _ALPHANUMERIC.search(line)]


def sentences(text: str) -> list[Sentence]:
    """Returns the sentences of `text` that hold a letter or digit: cut after `.`, `!` or `?` before a space, and at
    line ends.
    """
    found = _SENTENCE.finditer(text)
    return [
        Sentence(one["text"], one.start(), one["mark"] == "?") for one in found if _ALPHANUMERIC.search(one["text"])
    ]
