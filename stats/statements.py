"""Where an answer's text states its answer: boxes, "Answer:" lines, sentences, and the letters in them.

Every function is linear in its text: patterns repeat only what one character class bounds, and repetitions that could
be entered at every position have an upper count.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

_LINE_END = re.compile(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_SENTENCE_END = re.compile(r"[.!?](?=[*_)\"'$]{0,3}(?:\s|\Z))|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_ALPHANUMERIC = re.compile(r"\w")
_BOX_PART = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\banswers?(?:\s{1,3}(?:is|was))?[\s*_\"']{0,6}[:=]", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<![^\W_])_{1,3}([A-Za-z])_{1,3}(?![^\W_])")
_STANDALONE = re.compile(r"(?<![\w\\'])(?<!\w-)([A-Z])(?!\w)(?!-\w)")
_NEXT_WORD = re.compile(r"\s{1,3}([a-z]+)")
_WORD = re.compile(r"[a-z']+")
_FILLERS = frozenset(["be", "the", "a", "an", "letter", "option", "choice", "answer"])
_NEGATORS = frozenset(["not", "never", "neither", "nor", "cannot"])
_NEGATED_AFTER = re.compile(
    r"\W{0,4}(?:(?:is|was|can|could|does|do|must)\s{0,3})?(?:not|n't|never|wrong|incorrect|cannot|(?:ca|wo)n't)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"not\b|n't|never|neither|nor\b|wrong|incorrect", re.IGNORECASE)
_AFTER_A = re.compile(
    "is|was|fits|matches|has|it|because|since|as|with|and|or|but|not|seems|looks|must|would|should|can|cannot|could|gives|"
    "says|wins|holds|works|for|by|so|then|to|which|here|isn|does|doesn|remains|being|alone|in|from|we"
)
_AFTER_I = re.compile("is|fits|matches|because")

_TRANSLATION: dict[int, str | None] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-"),
    **dict.fromkeys((0x00A0, 0x2009, 0x202F, 0x3000), " "),
    **dict.fromkeys((0x2018, 0x2019), "'"),
    **dict.fromkeys((0x201C, 0x201D), '"'),
    **dict.fromkeys((0x200B, 0x2060, 0xFEFF), None),
    **{ord(sign): f" {spelt}" for sign, spelt in zip("½⅓⅔¼¾", ("1/2", "1/3", "2/3", "1/4", "3/4"), strict=True)},
}


def plain_characters(text: str) -> str:
    """`text` with full-width forms, minus signs, quotes and spaces in ASCII, zero-width characters removed.

    A fixed table, one character at a time: Unicode's own compatibility normalising sorts runs of combining marks in
    quadratic time in some Python releases.
    """
    return text.translate(_TRANSLATION)


def lines(text: str) -> list[str]:
    """The lines of `text` that hold a letter or digit."""
    return [line for line in _LINE_END.split(text) if line and _ALPHANUMERIC.search(line)]


def sentences(text: str) -> list[str]:
    """The statements of `text`: cut after `.`, `!` or `?` before a space, and at line ends; empty ones left out."""
    return [sentence for sentence in _SENTENCE_END.split(text) if sentence and _ALPHANUMERIC.search(sentence)]


def last_box(text: str) -> tuple[int, str] | None:
    """Position and content of the last complete, balanced `\\boxed{...}`; the inner one of nested boxes."""
    open_braces: list[tuple[bool, int, int]] = []
    best: tuple[int, int, int] | None = None
    for part in _BOX_PART.finditer(text):
        if part["box"] or part[0] == "{":
            open_braces.append((part["box"] is not None, part.start(), part.end()))
        elif part[0] == "}" and open_braces:
            is_box, start, inside = open_braces.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, inside, part.start())
    return None if best is None else (best[0], text[best[1] : best[2]])


def has_box(text: str) -> bool:
    """Whether `text` opens a box at all, complete or cut."""
    return any(part["box"] for part in _BOX_PART.finditer(text))


def last_answer_line(text: str) -> tuple[int, str] | None:
    """Position and content of the last "Answer:": the rest of its line, or the next line that is not blank."""
    last = max(_ANSWER_LINE.finditer(text), key=lambda match: match.start(), default=None)
    if last is None:
        return None
    rest = lines(text[last.end() :])
    return last.start(), rest[0] if rest else ""


def standalone_letters(statement: str) -> Iterator[tuple[str, bool]]:
    """Each capital letter that stands alone in `statement`, and whether it is ruled out ("not B", "B is wrong").

    The article "A" and the pronoun "I" are no letters: a lower-case word after them makes them one, save the few words
    that follow a letter ("A is", "A fits", "A because").
    """
    statement = _EMPHASIS.sub(r" \1 ", statement)
    may_negate = _NEGATION.search(statement) is not None
    for match in _STANDALONE.finditer(statement):
        letter, after = match[1], statement[match.end() : match.end() + 32]
        word = _NEXT_WORD.match(after)
        if letter == "A" and word and not _AFTER_A.fullmatch(word[1]):
            continue
        if letter == "I" and (after.startswith("'") or (word and not _AFTER_I.fullmatch(word[1]))):
            continue
        before = statement[max(0, match.start() - 48) : match.start()]
        yield letter, may_negate and (_ends_negated(before) or _NEGATED_AFTER.match(after) is not None)


def _ends_negated(before: str) -> bool:
    """Whether the last word before a letter negates it, words like "the option" left out."""
    words = _WORD.findall(before.lower())
    while words and words[-1] in _FILLERS:
        words.pop()
    return bool(words) and (words[-1] in _NEGATORS or words[-1].endswith("n't"))


def stated_letter(statement: str, choices: int) -> tuple[bool, str | None]:
    """(whether `statement` decides on a letter, that letter).

    Two different letters, or one beyond `choices`: (True, None). No letter, or one letter that is only ruled out:
    (False, None).
    """
    asserted, name = False, ""
    for letter, ruled_out in standalone_letters(statement):
        if name not in ("", letter):
            return True, None
        name, asserted = letter, asserted or not ruled_out
    if not asserted:
        return False, None
    return True, name if name in string.ascii_uppercase[:choices] else None
