r"""Finds the answer that a text states, and the one spelling of an expected number.

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
from collections.abc import Callable, Sequence

from stats.answers.explicit import last_box, last_explicit, unmarked
from stats.answers.letters import AMBIGUOUS, declared_letter, hinted_letter, lone_letter, only_letter
from stats.answers.numbers import only_number, stated_alone, stated_number
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
_CONCLUSION = re.compile(  # a sign, a point or a backslash before a digit belongs to the number after it
    r"\W{0,4}(?:(?:so|therefore|thus|hence|finally|wait|no|actually|sorry|oh|hmm)\b"
    r"(?:[^\w.\\$-]|[.-](?![.$\\0-9])){0,3}){1,3}",
    re.IGNORECASE,
)
Reader = Callable[[str, int], str | None]  # (sentence, number of choices) -> the answer that it states
Decided = tuple[str | None, list[Sentence]]  # the answer, and the sentences after the one that states it
_LABEL = re.compile(r"[\s*_(\"]{0,6}[A-Z]\s?[).:](?:[\s*_]|\Z)")


def expected_number(answer: str) -> str:
    """Returns the one spelling of a task's expected number: a bare number, or one after `####` as in GSM8K.

    Raises StatsInputError where no text could ever match it.
    """
    text = plain_characters(answer)
    number = only_number(text)
    if number is None and "####" in text:
        explicit = last_explicit(text)
        number = only_number(explicit.content or "") if explicit else None
    if number is None:
        raise StatsInputError(f"answer: expected a number without a unit, found {answer[:80]!r}")
    return number


def stated_answer(text: str, choices: int) -> str | None:
    """Returns the answer that `text` states, a letter or a number in its one spelling, or None. `choices` is the number
    of allowed letters, 0 to 26.
    """
    text = plain_characters(text)
    explicit = last_explicit(text)
    if explicit is None:
        every = (_declared_letter, hinted_letter, _declared_number)
        decided = _last(sentences(text), every, choices) or _lone_line(lines(text), choices)
    else:
        stated = _content(explicit.content, choices)
        later = sentences(text[explicit.end :])
        # only a letter replaces a letter
        is_letter = stated is not None and stated in string.ascii_uppercase
        readers = [_declared_letter] if is_letter else [_declared_letter, _declared_number]
        decided = _last(later, readers, choices) or (stated, later)
    stated, after = decided
    return None if stated == AMBIGUOUS or any(_TAKES_BACK.match(one.text) for one in after) else stated


def _last(found: list[Sentence], readers: Sequence[Reader], choices: int) -> Decided | None:
    """Returns the last answer that the first reader finds, else the next reader, ..., and the sentences after it."""
    for read in readers:
        for i in reversed(range(len(found))):
            stated = None if found[i].is_question else read(found[i].text, choices)
            if stated is not None:
                return stated, found[i + 1 :]
    return None


def _declared_letter(sentence: str, choices: int) -> str | None:
    """Returns the letter that `sentence` declares, or hints at in taking something back: "Wait, it is C"."""
    corrected = hinted_letter(sentence, choices) if _TAKES_BACK.match(sentence) else None
    return declared_letter(sentence, choices) or corrected


def _declared_number(sentence: str, choices: int) -> str | None:
    """Returns the number of "The answer is 17", "Therefore, 17" and "Wait, it should be 17"."""
    conclusion = _CONCLUSION.match(sentence)
    number = only_number(sentence[conclusion.end() :]) if conclusion else None
    word = _ANSWER_WORD.search(sentence) or (_CORRECTED.search(sentence) if _TAKES_BACK.match(sentence) else None)
    return number or (stated_number(sentence[word.end() :]) if word else None)


def _content(content: str | None, choices: int) -> str | None:
    """Returns the answer in an explicit statement's content."""
    box = last_box(content or "")  # a box in an answer line: "Answer: \boxed{72}"
    content = box.content if box else content
    if content is None:
        return None
    first = next((sentence.text for sentence in sentences(content)), "")
    letter = _whole_answer(content, choices) or _whole_answer(first, choices) or only_letter(first, choices)
    return letter or stated_number(first)


def _lone_line(found: list[str], choices: int) -> Decided:
    """Returns the answer that is the whole of the last or the first line, and the lines after it."""
    for i in (-1, 0) if found else ():
        content = unmarked(found[i])
        stated = _whole_answer(content or "", choices)
        if stated is None and _LABEL.match(found[i]):
            stated = only_letter(found[i], choices)
        stated = stated or stated_alone(content or "")
        if stated is not None:
            return stated, [Sentence(line, 0, False) for line in found[i:][1:]]
    return None, []


def _whole_answer(text: str, choices: int) -> str | None:
    """Returns the answer that is the whole of `text`, if it is one."""
    return lone_letter(text, choices) or only_number(text)
