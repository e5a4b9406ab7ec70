"""Word problems with four choices, their three worked solutions, the merge that compares them, and the answer.

A problem is a start and two to six gains or losses, no two with the same verb or size. The three branches solve it in
the order of the story, gains first, and losses first; merge quotes the three results, keeps the majority (the first
branch where all differ) and walks the choices to the one that fits; the answer is its letter. Everything is drawn from
a `random.Random` that the caller passes; no token is read here.

`wordings.json` holds every phrase: a slot's phrases are equally likely. Many natural phrases of equal probability are
the point: a model trained on them has many near ties, so its greedy choices are as sensitive to rounding as those of a
model of real text. Placeholders: `{N}` name, `{P}` pronoun, `{h}` possessive, `{o}` object, `{s}` number or letter.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

PHRASES: dict[str, list[str]] = json.loads((Path(__file__).parent / "wordings.json").read_text(encoding="utf-8"))
NAMES = PHRASES["she_names"] + PHRASES["he_names"]
LETTERS = ("A", "B", "C", "D")
ORDINALS = (("first", "second", "third"), ("one", "two", "three"))
LARGEST = 79  # the largest number that any text contains
SMALLEST_TOTAL, LARGEST_TOTAL = 1, 60
FEWEST_EVENTS, MOST_EVENTS, MOST_FILLERS = 2, 6, 5
HELD_OUT_BUCKETS = 16
SLIPS = (-10, -3, -2, -1, 1, 2, 3, 10)
BRANCHES = ("story", "gains", "losses")


class Piece(NamedTuple):
    """A stretch of text."""

    text: str
    planted: bool = False  # a number that is deliberately wrong and must not be learnt


class Event(NamedTuple):
    """A gain or a loss."""

    verb: str
    amount: int  # signed


@dataclass(frozen=True)
class Problem:
    """One problem."""

    name: str
    item: str
    start: int
    events: tuple[Event, ...]
    question: str
    choices: tuple[str, ...]
    answer: str  # the right choice's letter

    @property
    def amounts(self) -> tuple[int, ...]:
        return tuple(event.amount for event in self.events)

    @property
    def result(self) -> int:
        return self.start + sum(self.amounts)


def phrase(rng: random.Random, slot: str, **words: object) -> str:
    """Draws a phrase of a slot and fills its placeholders."""
    return rng.choice(PHRASES[slot]).format(**words)


def ordered(amounts: Sequence[int], branch: str) -> tuple[int, ...]:
    """Returns the indices of the events in the order in which `branch`, a name of `BRANCHES`, works through them."""
    turn = {"story": 0, "gains": -1, "losses": 1}[branch]  # a stable sort: gains and losses keep the story's order
    return tuple(sorted(range(len(amounts)), key=lambda index: turn * (amounts[index] > 0)))


def totals(start: int, amounts: Sequence[int]) -> list[int]:
    """Returns the running total after each amount."""
    return list(accumulate(amounts, initial=start))[1:]


def held_out(start: int, amounts: Sequence[int]) -> bool:
    """Whether this arithmetic is in the held-out sixteenth. A hash decides, so training and tasks share no problem."""
    digest = hashlib.sha256(repr((start, tuple(amounts))).encode("ascii")).digest()
    return digest[0] % HELD_OUT_BUCKETS == 0


def draw_arithmetic(rng: random.Random, count: int) -> tuple[int, tuple[int, ...]]:
    """Draws a start of 6-40 and `count` amounts of distinct size 2-9, at least one gain and one loss.

    Every partial total is 1-60 in all three orders.
    """
    while True:
        start = rng.randint(6, 40)
        amounts = tuple(size * rng.choice((1, -1)) for size in rng.sample(range(2, 10), count))
        orders = [[amounts[index] for index in ordered(amounts, branch)] for branch in BRANCHES]
        running = [total for order in orders for total in totals(start, order)]
        if min(amounts) < 0 < max(amounts) and SMALLEST_TOTAL <= min(running) <= max(running) <= LARGEST_TOTAL:
            return start, amounts


def draw_choices(rng: random.Random, result: int, amounts: Sequence[int]) -> list[int]:
    """Draws four different numbers: the result, a forgotten event, a reversed event and a small slip."""
    chosen = [result]
    for offsets in ([-amount for amount in amounts], [-2 * amount for amount in amounts], SLIPS):
        fresh: list[int] = []
        while not fresh:
            fresh = [n for n in (result + o for o in offsets) if 0 <= n <= LARGEST and n not in chosen]
            if not fresh:  # every one was taken or out of range: another small slip
                offsets = [rng.randint(-12, 12)]
        chosen.append(rng.choice(fresh))
    rng.shuffle(chosen)
    return chosen


def draw_problem(
    rng: random.Random, most_events: int = MOST_EVENTS, most_fillers: int = MOST_FILLERS, holdout: bool = False
) -> Problem:
    """Draws a problem of the training side, or of the held-out side, with at most so many events and fillers."""
    while True:
        start, amounts = draw_arithmetic(rng, rng.randint(FEWEST_EVENTS, most_events))
        if held_out(start, amounts) == holdout:
            break
    name, item, result = rng.choice(NAMES), phrase(rng, "objects"), start + sum(amounts)
    numbers = draw_choices(rng, result, amounts)
    gain_verbs, loss_verbs = (iter(rng.sample(PHRASES[f"{side}_verbs"], MOST_EVENTS)) for side in ("gain", "loss"))
    events = tuple(Event(next(gain_verbs if amount > 0 else loss_verbs), amount) for amount in amounts)
    pronoun, possessive = ("She", "her") if name in PHRASES["she_names"] else ("He", "his")
    words = {"N": name, "o": item, "P": pronoun, "h": possessive, "s": start}
    question = draw_question(rng, events, words, rng.randint(0, most_fillers))
    choices = tuple(f"{number} {item}" for number in numbers)
    return Problem(name, item, start, events, question, choices, LETTERS[numbers.index(result)])


def draw_question(rng: random.Random, events: Sequence[Event], words: Mapping[str, object], fillers: int) -> str:
    """Draws the story: the start, one sentence per event, filler sentences among them, and the question."""
    sentences = [
        f"{phrase(rng, 'event_openings', **words)} {verb} {abs(amount)} {phrase(rng, 'tails')}."
        for verb, amount in events
    ]
    for filler in rng.sample(PHRASES["fillers"], fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler.format(**words))
    return " ".join([phrase(rng, "starts", **words), *sentences, phrase(rng, "questions", **words)])


def branch_pieces(rng: random.Random, problem: Problem, branch: str, slip: bool = False) -> tuple[list[Piece], int]:
    """Draws a branch's text and its result; with `slip` one total is off by 1-3 or 10 and later steps follow it."""
    words = {"N": problem.name, "o": problem.item}
    events = [problem.events[index] for index in ordered(problem.amounts, branch)]
    slip_at = rng.randrange(len(events)) if slip else -1
    intro = f"{phrase(rng, f'{branch}_intros')} {phrase(rng, 'branch_starts', s=problem.start, **words)}"
    pieces, total = [Piece(intro)], problem.start
    for index, event in enumerate(events):
        gain, size = event.amount > 0, abs(event.amount)
        if branch != "story" and index and gain != (events[index - 1].amount > 0):
            pieces.append(Piece(" " + phrase(rng, "gains_turns" if gain else "losses_turns")))
        before, total = total, total + event.amount
        if index == slip_at:
            total = rng.choice([total + off for off in SLIPS if 0 <= total + off <= LARGEST_TOTAL])
        line = f" {phrase(rng, 'step_openings')} {event.verb} {size}, {phrase(rng, 'equations')}"
        pieces.append(Piece(f"{line} {before} {'+' if gain else '-'} {size} ="))
        pieces += [Piece(f" {total}", planted=index == slip_at), Piece(".")]
        if not 0 <= total <= LARGEST:
            return branch_pieces(rng, problem, branch, slip)  # the slip led out of range: draw another
    pieces.append(Piece(" " + phrase(rng, "branch_ends", s=total, **words)))
    return pieces, total


def kept_result(results: Sequence[int]) -> int:
    """Returns the majority of three results; where all differ, the first."""
    first, second, third = results
    return second if second == third else first


def merge_pieces(rng: random.Random, problem: Problem, results: Sequence[int]) -> tuple[list[Piece], str]:
    """Draws merge's text for three branch results, and the letter it arrives at: the nearest choice where none fits.

    The first word is always the same; the many wordings start with the second, so that the first greedy choice after
    the boundary is never a near tie. "18 fits" is said of the kept result first and then of the choice that equals it.
    """
    kept, ordinals = kept_result(results), rng.choice(ORDINALS)
    first, second, third = (f"{order} {result}" for order, result in zip(ordinals, results, strict=True))
    quotes = f"{first}{phrase(rng, 'separators')}{second}{phrase(rng, 'separators')}{third}"
    agreement = phrase(rng, f"agreement_{len(set(results))}")  # named by the number of different results
    numbers, fits = [int(choice.split()[0]) for choice in problem.choices], phrase(rng, "same")
    chosen = LETTERS[min(range(4), key=lambda index: (abs(numbers[index] - kept), index))]
    opening = f"The {phrase(rng, 'merge_openings')} {quotes}."
    lines = [f"{opening} {agreement} {kept} {problem.item}, so {kept} {fits}."]
    for letter, number in zip(LETTERS, numbers, strict=True):
        line = f"{letter}. {number} {fits if number == kept else phrase(rng, 'other')},"
        if number == kept:
            lines.append(f"{line} {phrase(rng, 'conclusions')} {letter}. {phrase(rng, 'ends')}")
            break
        lines.append(f"{line} {phrase(rng, 'our_verbs')} {kept} {problem.item}.")
    else:
        lines.append(f"{phrase(rng, 'nearest')} {chosen}. {phrase(rng, 'ends')}")
    return [Piece("\n".join(lines))], chosen
