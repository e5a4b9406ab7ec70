"""Splits text into lines and sentences, after mapping look-alike characters to ASCII."""

import re
from dataclasses import dataclass

MAX_SENTENCE = 2_000
"""A longer sentence is not read: an answer block holds 64 tokens."""

_LINE_END = re.compile(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_SENTENCE_END = re.compile(r"[.!?](?=[*_)\"'$]{0,3}(?:\s|\Z))|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
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


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, without its closing mark."""

    text: str
    start: int  # position of its first character in the whole text
    asks: bool  # whether it ends in a question mark


def plain_characters(text: str) -> str:
    """Return `text` with full-width forms, minus signs, quotes and spaces in ASCII, and zero-width characters removed.

    A fixed table, applied per character: Unicode's own compatibility normalisation sorts runs of combining marks in
    quadratic time in some Python releases.
    """
    return text.translate(_TRANSLATION)


def lines(text: str) -> list[str]:
    """Return the lines of `text` that hold a letter or digit."""
    return [line for line in _LINE_END.split(text) if line and _ALPHANUMERIC.search(line)]


def sentences(text: str) -> list[Sentence]:
    """Return the sentences of `text`: cut after `.`, `!` or `?` before a space, and at line ends. Those without a
    letter or digit are left out.
    """
    found, start = [], 0
    for end in (*_SENTENCE_END.finditer(text), None):
        sentence = text[start : end.start() if end else len(text)]
        if sentence and _ALPHANUMERIC.search(sentence):
            found.append(Sentence(sentence, start, end is not None and end[0] == "?"))
        start = end.end() if end else len(text)
    return found
