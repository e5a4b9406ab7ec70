"""Finds the choice letters that a sentence states, leaving out articles, names ("vitamin C") and rejected choices."""

import re
import string
from collections.abc import Callable
from typing import NamedTuple

from stats.answers.text import MAX_SENTENCE, before_reason, words

MAX_CHOICES = len(string.ascii_uppercase)
AMBIGUOUS = "?"  # in place of a letter: the statement names several letters, or one that is no choice

# -- what a letter stands between -------------------------------------------------------------------------------------
_INTRODUCE = words(  # may stand right before a letter that names a choice; after any other word the letter is a name's
    "is was are were be isn't wasn't it it's its that that's this the a an answer answers letter option options "
    "choice choices one so therefore thus hence then also again not never neither nor either or and but than to on "
    "for with as pick picks picked choose chooses chose choosing select selects selected take takes leaves say says "
    "think believe conclude must would should might may could cannot can't couldn't i we i'd i'm i'll we'd only just "
    "still well rather indeed both of between equals final correct right because since if when wait no yes actually"
)
_FOLLOW = words(  # may stand right after such a letter; before any other word A is an article, and others are a name's
    "is was fits matches has it because since as with and or but not seems looks must would should can cannot could "
    "gives says wins holds works for by so then to which that here isn does doesn remains being alone in from we "
    "fails the might may too ruled"
)
_FOLLOW_I = {"is", "fits", "matches", "because"}  # the same for I, which is a pronoun before any other word
_EMPHASIS = re.compile(r"(?<![^\W_])_{1,3}([A-Za-z])_{1,3}(?![^\W_])")
_STANDALONE = re.compile(r"(?<![\w\\'])(?<!\w[-.])([A-Z])(?![\w+#^]|-\w|\.[A-Za-z])")
_WORD_BEFORE = re.compile(r"([\w'%°]+)\s+\Z")
_WORD_AFTER = re.compile(r"\s{1,3}([a-z]+)")
_WORD = re.compile(r"[\w']+")
_WINDOW = 120  # characters before and after a letter that are read

# -- rejection --------------------------------------------------------------------------------------------------------
_REJECTS_BEFORE = re.compile(
    r"(?<![\w'])(?:not|never|neither|nor|cannot|\w+n't|than|unlike|except|out|instead[^\w']+of|without|eliminat\w+|"
    r"exclud\w+|reject\w*|discard\w*)(?:[^\w']+(?:be|the|an?|letter|option|choice|answer))*[^\w']*\Z"
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
_CHOICE = r"(?:choos(?:e|es|ing)|chose|pick(?:s|ed)?|select(?:s|ed)?|go(?:es|ing)?\swith|settled?\s(?:on|for))"
_DECLARED_BEFORE = [
    re.compile(pattern + r"\Z", re.IGNORECASE | re.DOTALL)
    for pattern in (
        rf"{_NOUN}[^:=]{{0,40}}?(?:\b(?:is|was|be|are)\b|[:=])(?P<between>.*)",
        r"\banswers?(?P<between>\W{0,4})",
        rf"\b(?:i|we|i'd|i'll)\b(?:\W+\w+){{0,2}}?\W+{_CHOICE}\b(?P<between>.*)",
    )
]
_DECLARED_AFTER = re.compile(
    r"\W{0,4}(?:is|was|remains|(?:must|would)\sbe)\b\W+(?:\w+\W+){0,2}?"
    r"(?:answer|(?:correct|right)(?=\W{0,4}(?:\Z|[,.;]|(?:answer|choice|option|one|letter|because|since|as|and|so)\b)))\b",
    re.IGNORECASE,
)
_HINTED_BEFORE = re.compile(
    rf"(?:\b(?:it|that|this)\s(?:is|must\sbe)|\b(?:it|that)'s|\bmakes\sit|\bleaves|\bpoints?\sto|\b{_CHOICE})\b(?P<between>.*)\Z",
    re.IGNORECASE | re.DOTALL,
)
_ENDS_CLAUSE = re.compile(r"[)*_\"$\]}]{0,4}\s*(?:\Z|[,;:(]|because\b|since\b|as\b|by\b|and\b|for\b)", re.IGNORECASE)
_HINTED_AFTER = re.compile(
    r"\W{0,4}(?:(?:is|was)\b(?:\W+\w+){0,3}?\W+)?(?:best\s)?(?:fits?|match(?:es|ed)?|works)\b", re.IGNORECASE
)
_LOWER_CASE = re.compile(
    r"\b(?:answer|letter|choice|option)\s{1,3}(?:is|was|(?:must|would|should)\sbe)\s{1,3}(?P<rest>\S.*)\Z", re.I | re.S
)
_LEAD = re.compile(r"\A(?:the\s)?(?:letter|choice|option|answer)\s+", re.IGNORECASE)
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mathsf|bm|left|right|[()\[\]])")
_EDGES = string.whitespace + "*_`\"'()[]{}$.,:;!?<>-"


class Letter(NamedTuple):
    """A letter that may name a choice."""

    name: str
    before: str  # the text before it in its sentence, at most _WINDOW characters
    after: str  # the text after it
    rejected: bool  # "not B", "B is wrong", "ruled out B"


def lone_letter(text: str, choices: int) -> str | None:
    """Returns the letter that is the whole of `text` in either case: "(b)", "**B**.", "option b"; else None.

    Here and below: `AMBIGUOUS` for a letter beyond the choices, and None where `choices` is 0.
    """
    bare = _DECORATION.sub("", text).strip(_EDGES).lstrip("#" + _EDGES)
    bare = _LEAD.sub("", bare, count=1).strip(_EDGES)
    return _choice({bare.upper()}, choices) if len(bare) == 1 and bare in string.ascii_letters else None


def only_letter(sentence: str, choices: int) -> str | None:
    """Returns the letter that `sentence` names and does not reject. Two letters, even if one is rejected: ambiguous."""
    return _named(sentence, choices, lambda letter: True) or _lower_case(sentence, choices)


def declared_letter(sentence: str, choices: int) -> str | None:
    """Returns the letter that `sentence` declares: "the answer is C", "we pick C", "C is correct", "Therefore, C"."""
    if _NO_STATEMENT.search(sentence):
        return None
    conclusion = _CONCLUSION.match(sentence)
    lone = lone_letter(conclusion["rest"], choices) if conclusion else None
    return lone or _named(sentence, choices, _declared) or _lower_case(sentence, choices)


def hinted_letter(sentence: str, choices: int) -> str | None:
    """Returns the letter that `sentence` hints at: "it is C", "that makes it C", "C fits"."""
    return None if _NO_STATEMENT.search(sentence) else _named(sentence, choices, _hinted)


def _named(sentence: str, choices: int, states: Callable[[Letter], bool]) -> str | None:
    """Returns the one letter of a sentence in which `states` is true of a letter that is not rejected."""
    found = _letters(sentence)
    stated = any(not letter.rejected and states(letter) for letter in found)
    return _choice({letter.name for letter in found}, choices) if stated else None


def _lower_case(sentence: str, choices: int) -> str | None:
    """Returns the letter, in either case, that ends "the answer is b"."""
    match = _LOWER_CASE.search(sentence)
    return lone_letter(match["rest"], choices) if match else None


def _choice(names: set[str], choices: int) -> str | None:
    """Returns the one letter if it is a choice, else `AMBIGUOUS`; None without choices."""
    if not choices:
        return None
    name = names.pop() if len(names) == 1 else AMBIGUOUS
    return name if name in string.ascii_uppercase[:choices] else AMBIGUOUS


def _letters(sentence: str) -> list[Letter]:
    """Returns the letters in `sentence` that can name a choice, up to its reason ("because ...").

    A letter after a word such as "vitamin" or a number, or before a word such as "cells", belongs to a name; "A" and
    "I" before such a word are article and pronoun.
    """
    found: list[Letter] = []
    if len(sentence) > MAX_SENTENCE:
        return found
    sentence = before_reason(_EMPHASIS.sub(r" \1 ", sentence), _WORD)
    for match in _STANDALONE.finditer(sentence):
        before, after = sentence[max(0, match.start() - _WINDOW) : match.start()], sentence[match.end() :][:_WINDOW]
        if _introduced(before) and _followed(match[1], after):
            clause = _CLAUSE_END.split(after, maxsplit=1)[0]
            rejected = _REJECTS_BEFORE.search(before.lower()) or _REJECTS_AFTER.search(clause)
            found.append(Letter(match[1], before, after, rejected is not None))
    return found


def _introduced(before: str) -> bool:
    """Whether the word right before a letter can introduce a choice; punctuation between them sets the letter apart."""
    word = _WORD_BEFORE.search(before[-40:])
    return word is None or (len(word[1]) == 1 and word[1].isupper()) or _introduces(word[1])


def _introduces(word: str) -> bool:
    """Whether `word` is one of `_INTRODUCE` or an adverb ("certainly")."""
    return word.lower() in _INTRODUCE or word.endswith("ly")


def _followed(letter: str, after: str) -> bool:
    """Whether the word after a letter leaves it a choice."""
    word = _WORD_AFTER.match(after)
    if letter == "I":
        return not after.startswith("'") and (word is None or word[1] in _FOLLOW_I)
    return word is None or word[1] in _FOLLOW or word[1].endswith("ly")


def _declared(letter: Letter) -> bool:
    """Whether the words around a letter declare it the answer."""
    found = (match for pattern in _DECLARED_BEFORE for match in pattern.finditer(letter.before))
    return _DECLARED_AFTER.match(letter.after) is not None or any(map(_plain, found))


def _hinted(letter: Letter) -> bool:
    """Whether the words around a letter hint that it is the answer."""
    hint = _HINTED_BEFORE.search(letter.before)
    before = hint is not None and _plain(hint) and _ENDS_CLAUSE.match(letter.after)
    return bool(_HINTED_AFTER.match(letter.after) or before)


def _plain(match: re.Match[str]) -> bool:
    """Whether only introducing words stand between a cue and its letter."""
    return all(len(word) == 1 or _introduces(word) for word in _WORD.findall(match["between"]))
