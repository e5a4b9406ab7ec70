"""The answer matcher: a corpus of texts with their answers, and the properties that hold for every string."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stats.errors import StatsInputError
from stats.numbers import MAX_BITS, format_number, parse_number
from stats.scoring import Scored, answers_equal, canonical, check_expected, extract_answer, is_correct, score
from stats.statements import last_box

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
PIECES = json.loads((Path(__file__).parent / "pieces.json").read_text())
ANY = st.text(st.characters(exclude_categories=()) | st.sampled_from("ABCDabI0123456789.,/%$\\{}()*_- \n"))
PHRASES = st.lists(st.sampled_from(PIECES["phrases"]))
TEXTS = ANY | PHRASES.map(" ".join) | PHRASES.map("".join)


def test_the_corpus_is_large_and_has_no_text_twice() -> None:
    assert len(CORPUS) >= 200 and len({(case["text"], case["choices"]) for case in CORPUS}) == len(CORPUS)
    assert sum(case["answer"] is None for case in CORPUS) >= 60


@pytest.mark.parametrize("case", CORPUS, ids=range(len(CORPUS)))
def test_corpus(case: dict[str, object]) -> None:
    text, choices, answer = case["text"], case["choices"], case["answer"]
    assert isinstance(text, str) and isinstance(choices, int)
    assert extract_answer(text, choices) == answer
    if isinstance(answer, str):
        assert score(text, answer, choices) == Scored(answer, True)
        assert not is_correct(text, "A" if answer != "A" else "B", choices)


def test_percent_is_a_hundredth_in_both_directions() -> None:
    for expected in ("35%", "0.35", "7/20", "35\\%", "\\frac{7}{20}"):
        for text in ("35%", "0.35", "7/20", "Answer: 35 percent", "\\boxed{\\frac{7}{20}}"):
            assert is_correct(text, expected, 0)
        assert not is_correct("35", expected, 0) and not is_correct(expected, "35", 0)


def test_expected_answers_in_any_spelling() -> None:
    assert is_correct("The answer is C", "(c)", 4) and is_correct("18", "18.0", 0)
    assert not is_correct("The answer is E", "E", 4) and is_correct("The answer is E", "E", 5)
    assert not is_correct("C", "", 4) and not is_correct("nan", "nan", 0) and not is_correct("", "", 0)


def test_expected_answers_that_nothing_could_match_are_refused() -> None:
    assert check_expected("(b)", 4, "row 3") == "B" and check_expected("6,400", 0, "row 3") == "6400"
    for answer, choices, kind in (("E", 4, "a letter A-D or a number"), ("", 4, "a letter"), ("B", 0, "a number")):
        with pytest.raises(StatsInputError, match=f"^row 3: expected {kind}"):
            check_expected(answer, choices, "row 3")
    for choices in (-1, 27):
        with pytest.raises(StatsInputError, match=f"found {choices}"):
            extract_answer("A", choices)


def test_decimals_are_exact() -> None:
    assert not answers_equal("0.1", "0.1000000000000000055511151231257827")
    assert not answers_equal("0.3333333333333333", "1/3") and answers_equal("0.1", "10%")
    assert answers_equal("9007199254740993", "9,007,199,254,740,993")
    assert not answers_equal("9007199254740993", "9007199254740992")


@given(TEXTS, st.integers(0, 26))
def test_no_string_raises_and_answers_are_canonical(text: str, choices: int) -> None:
    answer = extract_answer(text, choices)
    assert answer is None or canonical(answer, choices) == answer


@given(TEXTS, st.integers(0, 26))
def test_canonical_is_idempotent(text: str, choices: int) -> None:
    normal = canonical(text, choices)
    assert normal is None or canonical(normal, choices) == normal


@given(TEXTS, TEXTS)
def test_equality_is_symmetric_and_reflexive_on_answers(left: str, right: str) -> None:
    assert answers_equal(left, right) == answers_equal(right, left)
    assert answers_equal(left, left) == (canonical(left) is not None)
    assert is_correct(left, right, 4) in (True, False)


@given(st.fractions(), st.sampled_from(["{}", " {}.", "${}$", "Answer: {}", "\\boxed{{{}}}", "The answer is **{}**."]))
def test_every_fraction_is_read_back(value: Fraction, frame: str) -> None:
    spelt = format_number(value)
    assert parse_number(spelt) == value
    assert extract_answer(frame.format(spelt), 0) == spelt
    assert extract_answer(frame.format(f"{value.numerator}/{value.denominator}"), 0) == spelt


@given(st.integers(-(2**MAX_BITS), 2**MAX_BITS), st.integers(1, 2**MAX_BITS), st.integers(-999, 999))
def test_large_numbers_are_read_back_or_refused(p: int, q: int, exponent: int) -> None:
    for text in (f"{p}/{q}", f"{p}e{exponent}", f"{q}.{abs(p)}", f"{q} {abs(p)}/{q}"):
        value = parse_number(text)
        assert value is None or parse_number(format_number(value)) == value


@given(
    st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from(["{} or {}", "{}/{}", "({}), ({})", "{}, not {}"])
)
def test_two_letters_in_a_statement_are_no_answer(first: str, second: str, frame: str) -> None:
    stated = first if first == second else None
    for text in (f"Answer: {frame}", f"The answer is {frame}.", "\\boxed{{" + frame + "}}"):
        assert extract_answer(text.format(first, second), 4) in {stated, None if "not" in frame else stated}


@given(st.text("\\boxed{} a"))
def test_last_box_is_what_a_plain_search_finds(text: str) -> None:
    assert last_box(text) == plain_last_box(text)


def plain_last_box(text: str) -> tuple[int, str] | None:
    """The last start from which a box closes, tried one by one; a backslash hides the character after it."""
    hidden, i = set(), 0
    while i < len(text):
        if text[i] == "\\" and not text[i:].startswith("\\boxed"):
            hidden.add(i + 1)
            i += 1
        i += 1
    for start in range(len(text) - 1, -1, -1):
        if start in hidden or not text[start:].startswith("\\boxed"):
            continue
        rest = text[start + len("\\boxed") :]
        inside = start + len("\\boxed") + len(rest) - len(rest.lstrip()) + 1
        if not rest.lstrip().startswith("{"):
            continue
        depth = 1
        for end in range(inside, len(text)):
            if end not in hidden:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return start, text[inside:end]
    return None


def seconds(text: str) -> float:
    start = time.process_time()
    extract_answer(text, 4)
    answers_equal(text, text)
    return time.process_time() - start


FRAMES = [("", ""), ("Answer: ", ""), ("The answer is ", " B"), ("\\boxed{", "}")]


def check_linear(piece: str, frame: tuple[str, str], size: int) -> None:
    """Eight times the text in less than sixteen times the processor time (quadratic would be 64)."""
    small, large = (frame[0] + piece * (n // len(piece)) + frame[1] for n in (size // 8, size))
    seconds(small[:1_000])
    assert seconds(large) < 16 * max(seconds(small), 0.01), f"{piece!r} repeated after {frame[0]!r}"


@pytest.mark.parametrize("piece", ["\\boxed{", "not B ", "1,", "\n"], ids=ascii)
def test_time_is_linear(piece: str) -> None:
    check_linear(piece, FRAMES[1], 1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES["repeated"], ids=ascii)
def test_time_is_linear_on_a_megabyte_of_anything(piece: str) -> None:
    for frame in FRAMES:
        check_linear(piece, frame, 1_000_000)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(TEXTS, st.integers(0, 26))
def test_no_string_raises_among_many(text: str, choices: int) -> None:
    answer = extract_answer(text, choices)
    assert answer is None or canonical(answer, choices) == answer
