"""The answer matcher: a corpus of texts with their answers, and the properties that hold for every string."""

import gc
import json
import re
import string
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stats.answers.explicit import last_box
from stats.answers.numbers import MAX_BITS, format_number, parse_number
from stats.answers.score import expected_number, stated_answer
from stats.errors import StatsInputError

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text().splitlines()]
PIECES = json.loads((Path(__file__).parent / "pieces.json").read_text())
ANY = st.text(st.characters(exclude_categories=()) | st.sampled_from("ABCDabI0123456789.,/%$\\{}()*_- \n"))
PHRASES = st.lists(st.sampled_from(PIECES["phrases"]))
TEXTS = ANY | PHRASES.map(" ".join) | PHRASES.map("".join)


def test_the_corpus_is_large_and_has_no_text_twice():
    assert len(CORPUS) >= 200 and len({(case["text"], case["choices"]) for case in CORPUS}) == len(CORPUS)
    assert sum(case["answer"] is None for case in CORPUS) >= 60


@pytest.mark.parametrize("case", CORPUS, ids=range(len(CORPUS)))
def test_corpus(case):
    """MMLU-Pro 7, simple-evals 33 (case 18); opencompass 2647, lm-evaluation-harness 2552 (case 19);
    open-instruct 1764 (case 20)."""
    text, choices, answer = case["text"], case["choices"], case["answer"]
    assert stated_answer(text, choices) == answer


def test_percent_is_a_hundredth_in_both_directions():
    for expected in ("35%", "0.35", "7/20", "35\\%", "\\frac{7}{20}"):
        for text in ("35%", "0.35", "7/20", "Answer: 35 percent", "\\boxed{\\frac{7}{20}}"):
            assert stated_answer(text, 0) == expected_number(expected)
        assert stated_answer("35", 0) != expected_number(expected)


@pytest.mark.parametrize(
    ("text", "expected", "correct"),
    [
        *[("18", "18.0", True), ("0.3333333333333333", "1/3", False), ("0.1", "10%", True)],
        ("0.1", "0.1000000000000000055511151231257827", False),  # decimals are exact
        ("9007199254740993", "9,007,199,254,740,993", True),
        ("9007199254740993", "9007199254740992", False),
        *[("72", "<<6*12=72>>72.\n#### 72", True), ("1200", "She has 5.\n#### 1,200", True)],
    ],
)
def test_expected_numbers_in_any_spelling(text, expected, correct):
    assert (stated_answer(f"The answer is {text}.", 0) == expected_number(expected)) is correct


@pytest.mark.parametrize(
    "answer", ["", "nan", "B", "80 km/h", "Lima", "<<6*12=72>>72", "#### 72 apples", "#### 72\n#### 73"]
)
def test_expected_numbers_that_nothing_could_match_are_refused(answer):
    with pytest.raises(StatsInputError, match=r"^answer: expected a number without a unit"):
        expected_number(answer)


def check_spelling(text, choices):
    """Any string gives no answer, or one that states itself, a number in the spelling of expected numbers."""
    found = stated_answer(text, choices)
    assert found is None or stated_answer(found, choices) == found
    assert found is None or found in string.ascii_uppercase or expected_number(found) == found


@given(TEXTS, st.integers(0, 26))
def test_no_string_raises_and_answers_have_one_spelling(text, choices):
    check_spelling(text, choices)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(TEXTS, st.integers(0, 26))
def test_no_string_raises_among_many(text, choices):
    check_spelling(text, choices)


@given(st.fractions(), st.sampled_from(["{}", " {}.", "${}$", "Answer: {}", "\\boxed{{{}}}", "The answer is **{}**."]))
def test_every_fraction_is_read_back(value, frame):
    spelt = format_number(value)
    assert parse_number(spelt) == value
    assert stated_answer(frame.format(spelt), 0) == spelt
    assert stated_answer(frame.format(f"{value.numerator}/{value.denominator}"), 0) == spelt


@given(st.integers(-(2**MAX_BITS), 2**MAX_BITS), st.integers(1, 2**MAX_BITS), st.integers(-999, 999))
def test_large_numbers_are_read_back_or_refused(p, q, exponent):
    for text in (f"{p}/{q}", f"{p}e{exponent}", f"{q}.{abs(p)}", f"{q} {abs(p)}/{q}"):
        value = parse_number(text)
        assert value is None or parse_number(format_number(value)) == value


WORDS = st.sampled_from([*"x=+-(),", "coins", "km", "of", "and", "^2", "m2", "half", "answer", "is"])
SOUP = st.lists(WORDS | st.text("0123456789.,/x²mk^-", min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=1_000, deadline=None)
@given(
    SOUP, st.sampled_from(["{}", "Answer: {}", "The answer is {}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>"])
)
def test_a_number_that_is_read_stands_in_the_text(soup, frame):
    """No number is made of pieces: what is read is one of the words, with the space before it as a mixed number's."""
    text = " ".join(soup)
    stated = stated_answer(frame.format(text), 0)
    words = re.split(r"[\s=()]+", text)
    alone = [*words, *(f"{a} {b}" for a, b in pairwise(words)), text, *text.split("=")]
    values = {parse_number(word.rstrip(".,")) for word in alone}
    assert stated is None or parse_number(stated) in values


@pytest.mark.parametrize(
    "unit", ["coins", "km/h", "per day", "\\text{ m}^2", "\\mathrm{~kg}", "°C", "in total", "(2+5)"]
)
@given(value=st.fractions())
def test_a_unit_moves_no_number(unit, value):
    for frame in ("Answer: {} {}", "The answer is {} {}.", "\\boxed{{{} {}}}"):
        assert stated_answer(frame.format(format_number(value), unit), 0) == format_number(value)


@pytest.mark.parametrize(
    "change", ["half of {}", "{} squared", "{} pi", "{} + x", "less than {}", "not {}", "{} and a half"]
)
@given(value=st.fractions())
def test_a_word_that_changes_the_value_leaves_no_answer(change, value):
    for frame in ("Answer: {}", "The answer is {}.", "\\boxed{{{}}}"):
        assert stated_answer(frame.format(change.format(format_number(value))), 0) is None


@pytest.mark.parametrize("name", ["Hepatitis {}", "vitamin {}", "{} cells", "25 {}", "D.{}.", "{}++"])
@given(letter=st.sampled_from("BCD"))
def test_a_letter_inside_a_name_is_no_statement(name, letter):
    spelt = name.format(letter)
    for frame in ("The answer is {}", "It is {}", "{} fits", "Answer: {}", "We pick {}"):
        assert stated_answer(frame.format(spelt), 4) not in set("ABCD")
    assert stated_answer(f"The answer is A. {spelt} matches nothing here.", 4) == "A"
    assert stated_answer(f"The answer is {letter}", 4) == letter, "the control"


@given(first=st.sampled_from("ABCD"), last=st.sampled_from("ABCD"))
def test_a_later_correction_counts(first, last):
    for statement in (f"Answer: {first}.", f"The answer is {first}.", f"\\boxed{{{first}}}."):
        for correction in ("Wait, the answer is {}.", "No, {} is correct.", "Actually, {}.", "Wait, it's {}."):
            assert stated_answer(f"{statement} {correction.format(last)}", 4) == last
        assert stated_answer(f"{statement} Wait, that is wrong.", 4) is None
        assert stated_answer(f"{statement} It's {last} that looks right but fails.", 4) == first
        assert stated_answer(f"{statement} {last} is tempting.", 4) == first


@given(
    st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from(["{} or {}", "{}/{}", "({}), ({})", "{}, not {}"])
)
def test_two_letters_in_a_statement_are_no_answer(first, second, frame):
    stated = first if first == second else None
    for text in (f"Answer: {frame}", f"The answer is {frame}.", "\\boxed{{" + frame + "}}"):
        assert stated_answer(text.format(first, second), 4) in {stated, None if "not" in frame else stated}


@given(st.text("\\boxed{} a"))
def test_last_box_is_what_a_plain_search_finds(text):
    """Case 20."""
    box = last_box(text)
    assert (None if box is None or box.start < 0 else (box.start, box.content)) == plain_last_box(text)


def plain_last_box(text):
    """The last start from which a box closes, tried one by one; a backslash hides the character after it."""
    hidden = {m.end() - 1 for m in re.finditer(r"\\boxed|\\.", text, re.DOTALL) if m[0] != "\\boxed"}
    for found in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for end in range(found.end(), len(text) if found.start() not in hidden else 0):
            if end not in hidden:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return found.start(), text[found.end() : end]
    return None


def seconds(text):
    """Processor time without the garbage collector, which would visit every object of the test session."""
    gc.disable()
    start = time.process_time()
    stated_answer(text, 4)
    spent = time.process_time() - start
    gc.enable()
    return spent


FRAMES = [("Answer: ", ""), ("", ""), ("The answer is ", " B"), ("\\boxed{", "}")]
QUICK = [pytest.param(piece, FRAMES[:1], id=ascii(piece)) for piece in ("\\boxed{", "not B ", "1,", "\n")]
SLOW = [pytest.param(piece, FRAMES, marks=pytest.mark.slow, id=ascii(piece)) for piece in PIECES["repeated"]]


@pytest.mark.parametrize(("piece", "frames"), [*QUICK, *SLOW])
def test_time_is_linear(piece, frames):
    """A megabyte in less than sixteen times the processor time of an eighth of it (quadratic would be 64), at once or,
    where other processes share the core, at the second or third try."""
    for before, after in frames:
        small, large = (before + piece * (size // len(piece)) + after for size in (125_000, 1_000_000))
        seconds(small[:1_000])
        tries = (seconds(large) < 16 * max(seconds(small), 0.01) for _ in range(3))
        assert any(tries), f"{piece!r} repeated after {before!r}"
