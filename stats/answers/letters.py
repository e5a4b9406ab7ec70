"""Finds the choice letters that a sentence states, leaving out articles, names ("vitamin C") and rejected choices."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from stats.answers.text import MAX_SENTENCE
from stats.answers.words import AFTER_I, AFTER_LETTER, BEFORE_LETTER, FILLERS

MAX_CHOICES = len(string.ascii_uppercase)

# -- what a letter stands between -------------------------------------------------------------------------------------
_EMPHASIS = re.compile(r"(?<![^\W_])_{1,3}([A-Za-z])_{1,3}(?![^\W_])")
_STANDALONE = re.compile(r"(?<![\w\\'])(?<!\w[-.])([A-Z])(?![\w+#^]|-\w|\.[A-Za-z])")
_WORD_BEFORE = re.compile(r"([\w'%°]+)\s+\Z")
_WORD_AFTER = re.compile(r"\s{1,3}([a-z]+)")
_WORD = re.compile(r"[\w']+")
_REASON = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)

# -- rejection --------------------------------------------------------------------------------------------------------
_REJECTS_BEFORE = re.compile(
    r"not|never|neither|nor|cannot|\w+n't|than|unlike|except|out|of|without|eliminat\w+|exclud\w+|reject\w*|discard\w*"
)
_CLAUSE_END = re.compile(r"[;:]|,(?!\s{0,3}(?:but|which|that|though|although|however|yet)\b)", re.IGNORECASE)
_REJECTS_AFTER = re.compile(
    r"\bnot\b|n't\b|\b(?:never|cannot|wrong|incorrect|false|fail(?:s|ed)?|impossible|tempting|exclud\w+|eliminat\w+|"
    r"reject\w+|ruled\sout|distractor|too)\b",
    re.IGNORECASE,
)

# -- statements -------------------------------------------------------------------------------------------------------
_NO_STATEMENT = re.compile(  # a hypothesis, or what was thought before
    r"\A\W{0,4}(?:if|suppose|supposing|assume|assuming|unless|were)\b|\b(?:would|could|might)\b.{0,80}?\bif\b|"
    r"\b(?:(?:would|could)\shave|almost|nearly|at\sfirst|initially|originally|previously|tempt\w*)\b|"
    r"\bfirst\s(?:choice|guess|thought|answer|instinct|pick)\b",
    re.IGNORECASE | re.DOTALL,
)
_CONCLUSION = re.compile(
    r"\W{0,4}(?:(?:so|therefore|thus|hence|finally|then|wait|no|yes|actually|rather|sorry|correction|oops|oh|hmm|i\smean)"
    r"\b\W{0,4}){1,3}(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_NOUN = r"\b(?:answers?|letter|choice|option|one)\b"
_DECLARED = re.compile(rf"{_NOUN}[^:=]{{0,40}}?(?:\b(?:is|was|be|are)\b|[:=])(?P<between>.*)\Z", re.I | re.S)
_NAMED = re.compile(r"\banswers?(?P<between>\W{0,4})\Z", re.IGNORECASE)
_CHOICE = r"(?:choos(?:e|es|ing)|chose|pick(?:s|ed)?|select(?:s|ed)?|go(?:es|ing)?\swith|settled?\s(?:on|for))"
_CHOSEN = re.compile(rf"\b(?:i|we|i'd|i'll)\b(?:\W+\w+){{0,2}}?\W+{_CHOICE}\b(?P<between>.*)\Z", re.I | re.S)
_VERDICT = re.compile(
    r"\W{0,4}(?:is|was|remains|(?:must|would)\sbe)\b\W+(?:\w+\W+){0,2}?"
    r"(?:answer|(?:correct|right)(?=\W{0,4}(?:\Z|[,.;]|(?:answer|choice|option|one|letter|because|since|as|and|so)\b)))\b",
    re.IGNORECASE,
)
_HINTED = re.compile(
    rf"(?:\b(?:it|that|this)\s(?:is|must\sbe)|\b(?:it|that)'s|\bmakes\sit|\bleaves|\bpoints?\sto|\b{_CHOICE})\b(?P<between>.*)\Z",
    re.IGNORECASE | re.DOTALL,
)
_ENDS_CLAUSE = re.compile(r"[)*_\"$\]}]{0,4}\s*(?:\Z|[,;:(]|because\b|since\b|as\b|by\b|and\b|for\b)", re.IGNORECASE)
_SUITS = re.compile(r"\W{0,4}(?:(?:is|was)\b(?:\W+\w+){0,3}?\W+)?(?:best\s)?(?:fits?|match(?:es|ed)?|works)\b", re.I)
_LOWER = re.compile(
    r"\b(?:answer|letter|choice|option)\s{1,3}(?:is|was|(?:must|would|should)\sbe)\s{1,3}(?P<rest>\S.*)\Z", re.I | re.S
)
_LEAD = re.compile(r"\A(?:the\s)?(?:letter|choice|option|answer)\s+", re.IGNORECASE)
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mathsf|bm|left|right|[()\[\]])")
_EDGES = string.whitespace + "*_`\"'()[]{}$.,:;!?<>-"
_WINDOW = 120  # characters before a letter that can introduce it


@dataclass(frozen=True, slots=True)
class Stated:
    """What a statement states. `answer`: a letter or a number; None where the statement is ambiguous or malformed."""

    answer: str | None


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter that may name a choice."""

    name: str
    before: str  # the text before it in its sentence, at most _WINDOW characters
    after: str  # the text after it
    rejected: bool  # "not B", "B is wrong", "ruled out B"


def lone_letter(text: str, choices: int) -> Stated | None:
    """Return the letter that is the whole of `text` in either case: "(b)", "**B**.", "option b"."""
    bare = _DECORATION.sub("", text).strip(_EDGES).lstrip("#" + _EDGES)
    bare = _LEAD.sub("", bare, count=1).strip(_EDGES)
    if len(bare) != 1 or bare not in string.ascii_letters:
        return None
    return _allowed(bare.upper(), choices)


def only_letter(sentence: str, choices: int) -> Stated | None:
    """Return the letter that `sentence` names without rejecting it. Two different letters, rejected or not, are
    ambiguous.
    """
    return _one(list(letters(sentence)), choices) or _lower_case(sentence, choices)


def declared_letter(sentence: str, choices: int) -> Stated | None:
    """Return the letter that `sentence` declares: "the answer is C", "we pick C", "C is correct", "Therefore, C"."""
    if _NO_STATEMENT.search(sentence):
        return None
    conclusion = _CONCLUSION.match(sentence)
    lone = lone_letter(conclusion["rest"], choices) if conclusion else None
    found = list(letters(sentence))
    if lone is None and any(not letter.rejected and _declares(letter) for letter in found):
        return _one(found, choices)
    return lone or _lower_case(sentence, choices)


def hinted_letter(sentence: str, choices: int) -> Stated | None:
    """Return the letter that `sentence` hints at: "it is C", "that makes it C", "C fits"."""
    if _NO_STATEMENT.search(sentence):
        return None
    found = list(letters(sentence))
    if any(not letter.rejected and _hints(letter) for letter in found):
        return _one(found, choices)
    return None


def letters(sentence: str) -> Iterator[Letter]:
    """Yield the letters in `sentence` that can name a choice, up to its reason ("because ...").

    A letter after a word such as "vitamin" or a number, or before a word such as "cells", belongs to a name; "A" and
    "I" before such a word are article and pronoun.
    """
    if len(sentence) > MAX_SENTENCE:
        return
    sentence = _EMPHASIS.sub(r" \1 ", sentence)
    reason = _REASON.search(sentence)
    if reason and _WORD.search(sentence, 0, reason.start()):
        sentence = sentence[: reason.start()]
    for match in _STANDALONE.finditer(sentence):
        before, after = sentence[max(0, match.start() - _WINDOW) : match.start()], sentence[match.end() :][:_WINDOW]
        if _introduced(before) and _followed(match[1], after):
            yield Letter(match[1], before, after, _rejected(before, after))


def _introduced(before: str) -> bool:
    """Whether the word right before a letter can introduce a choice; punctuation between them sets the letter apart."""
    word = _WORD_BEFORE.search(before[-40:])
    return word is None or (len(word[1]) == 1 and word[1].isupper()) or _introduces(word[1])


def _introduces(word: str) -> bool:
    return word.lower() in BEFORE_LETTER or word.endswith("ly")


def _followed(letter: str, after: str) -> bool:
    """Whether the word after a letter leaves it a choice."""
    if letter == "I":
        word = _WORD_AFTER.match(after)
        return not after.startswith("'") and (word is None or word[1] in AFTER_I)
    word = _WORD_AFTER.match(after)
    return word is None or word[1] in AFTER_LETTER or word[1].endswith("ly")


def _rejected(before: str, after: str) -> bool:
    words = _WORD.findall(before.lower())
    while words and words[-1] in FILLERS:
        words.pop()
    if words and _REJECTS_BEFORE.fullmatch(words[-1]) and (words[-1] != "of" or words[-2:-1] == ["instead"]):
        return True
    end = _CLAUSE_END.search(after)
    return _REJECTS_AFTER.search(after, 0, end.start() if end else len(after)) is not None


def _declares(letter: Letter) -> bool:
    return _VERDICT.match(letter.after) is not None or any(
        _plain(match) for pattern in (_DECLARED, _NAMED, _CHOSEN) for match in pattern.finditer(letter.before)
    )


def _hints(letter: Letter) -> bool:
    if _SUITS.match(letter.after):
        return True
    hint = _HINTED.search(letter.before)
    return hint is not None and _plain(hint) and _ENDS_CLAUSE.match(letter.after) is not None


def _plain(match: re.Match[str]) -> bool:
    """Whether only introducing words stand between a cue and its letter."""
    return all(len(word) == 1 or _introduces(word) for word in _WORD.findall(match["between"]))


def _one(found: list[Letter], choices: int) -> Stated | None:
    if all(letter.rejected for letter in found):
        return None
    names = {letter.name for letter in found}
    return _allowed(names.pop(), choices) if len(names) == 1 else Stated(None)


def _lower_case(sentence: str, choices: int) -> Stated | None:
    """Return the letter, in either case, that ends "the answer is b"."""
    match = _LOWER.search(sentence)
    return lone_letter(match["rest"], choices) if match else None


def _allowed(name: str, choices: int) -> Stated:
    return Stated(name if name in string.ascii_uppercase[:choices] else None)
