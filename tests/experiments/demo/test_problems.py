"""The word problems: determinism, right arithmetic by an independent reading of the text, held-out problems apart."""

import random
import re

import pytest

from experiments.demo.corpus import held_out_tasks
from experiments.demo.problems import (
    BRANCHES,
    LETTERS,
    PHRASES,
    branch_pieces,
    draw_problem,
    held_out,
    kept_result,
    merge_pieces,
    ordered,
    totals,
)

GAINS = {"found", "bought", "won", "collected", "received", "earned", "gathered", "added"}
LOSSES = {"lost", "sold", "broke", "dropped", "donated", "lent", "discarded", "spent"}


def read_story(question):
    """Start and signed events as a reader finds them: the first number, then each verb with the number after it."""
    start = int(re.search(r"\d+", question).group())
    found = re.findall(r"\b([a-z]+) (\d+) (?:at|in|on|near|by|during)\b", question)
    assert all(verb in GAINS | LOSSES for verb, _ in found)
    return start, tuple(int(size) if verb in GAINS else -int(size) for verb, size in found)


def text(pieces):
    return "".join(piece.text for piece in pieces)


def numbers(choices):
    return [int(choice.split()[0]) for choice in choices]


def test_story_gives_the_arithmetic_no_verb_or_size_twice_and_the_right_letter():
    rng = random.Random(11)
    problems = [draw_problem(rng) for _ in range(2000)]
    for problem in problems:
        start, events = read_story(problem.question)
        assert (start, events) == (problem.start, problem.amounts)
        assert len({verb for verb, _ in problem.events}) == len(set(map(abs, events))) == len(events)
        choices = numbers(problem.choices)
        assert len(set(choices)) == 4 and choices["ABCD".index(problem.answer)] == start + sum(events)
    answers = [problem.answer for problem in problems]
    assert all(400 < answers.count(letter) < 600 for letter in LETTERS)
    # the control: a changed number is noticed
    size = abs(problems[0].amounts[0])
    changed = re.sub(rf"\b{size} (at|in|on|near|by|during)\b", rf"{size + 1} \1", problems[0].question, count=1)
    start, events = read_story(changed)
    assert start + sum(events) != problems[0].result


def test_branches_reach_the_result_in_their_own_order():
    rng = random.Random(3)
    for _ in range(100):
        problem = draw_problem(rng)
        for branch in BRANCHES:
            pieces, result = branch_pieces(rng, problem, branch)
            steps = re.findall(r"(\w+) (\d+), [a-z ]+ \d+ ([+-]) (\d+) = (\d+)\.", text(pieces))
            expected = [problem.events[index] for index in ordered(problem.amounts, branch)]
            assert [(verb, int(sign + size)) for verb, _, sign, size, _ in steps] == expected
            assert all(stated == size for _, stated, _, size, _ in steps)
            assert [int(total) for *_, total in steps] == totals(problem.start, [event.amount for event in expected])
            assert text(pieces).rstrip().endswith(f" {result}") and result == problem.result
            assert not any(piece.planted for piece in pieces)


def test_a_planted_slip_is_one_marked_number_and_later_steps_follow_it():
    rng = random.Random(4)
    for _ in range(100):
        problem = draw_problem(rng)
        pieces, result = branch_pieces(rng, problem, "story", slip=True)
        assert sum(piece.planted for piece in pieces) == 1
        equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)\.", text(pieces))
        assert sum(int(before) + int(sign + size) != int(total) for before, sign, size, total in equations) == 1
        assert result == int(equations[-1][3]) != problem.result
        assert [before for before, *_ in equations[1:]] == [total for *_, total in equations[:-1]]


@pytest.mark.parametrize("results", [(7, 7, 7), (7, 7, 9), (7, 9, 7), (9, 7, 7), (7, 8, 9)])
def test_merge_keeps_the_majority_or_the_first(results):
    assert kept_result(results) == 7


def test_merge_quotes_keeps_and_walks_the_choices_to_the_fitting_one():
    rng = random.Random(6)
    for _ in range(100):
        problem = draw_problem(rng)
        results = (problem.result + 1, problem.result, problem.result)
        pieces, letter = merge_pieces(rng, problem, results)
        found, choices = [int(number) for number in re.findall(r"\d+", text(pieces))], numbers(problem.choices)
        assert found[:5] == [*results, problem.result, problem.result]
        walked = choices[: choices.index(problem.result) + 1]
        assert found[5::2] == walked and found[6::2] == [problem.result] * (len(walked) - 1)
        assert re.findall(r" ([A-D])\.", text(pieces)) == [letter] == [problem.answer]
        verdicts = re.findall(r"^[A-D]\. \d+ (\w+),", text(pieces), flags=re.MULTILINE)
        assert [verdict in PHRASES["same"] for verdict in verdicts] == [choice == problem.result for choice in walked]
        assert f"so {problem.result} {verdicts[-1]}." in text(pieces)


def test_merge_takes_the_nearest_choice_where_none_fits():
    problem = draw_problem(random.Random(8))
    choices = numbers(problem.choices)
    kept = next(number for number in range(80) if number not in choices)
    pieces, letter = merge_pieces(random.Random(1), problem, (kept, kept, kept))
    assert [line[:2] for line in text(pieces).splitlines()[1:5]] == ["A.", "B.", "C.", "D."]
    assert abs(choices["ABCD".index(letter)] - kept) == min(abs(choice - kept) for choice in choices)


def test_training_and_held_out_problems_never_meet():
    rng = random.Random(9)
    training = {(p.start, p.amounts) for p in (draw_problem(rng) for _ in range(3000))}
    tasks = {read_story(str(task["question"])) for task in held_out_tasks(9, 100)}
    assert len(tasks) == 100
    assert all(held_out(*key) for key in tasks) and not any(held_out(*key) for key in training)
    assert not tasks & training
