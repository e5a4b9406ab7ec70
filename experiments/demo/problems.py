"""Word problems with four choices, their three worked solutions, the merge that compares them, and the answer.

A problem is a start and two to six gains or losses of distinct size, one a day from Monday on. The three branches
solve it as told, gains first, and losses first; merge quotes the three results, keeps the majority (the first branch
where all differ) and walks the choices; the answer is a letter. Everything is drawn from a `random.Random` that the
caller passes; nothing here knows tokens.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from experiments.demo import wordings as w

SMALLEST_TOTAL, LARGEST_TOTAL = 1, 60
FEWEST_EVENTS, MOST_EVENTS, MOST_FILLERS = 2, 6, 5
HELD_OUT_BUCKETS = 16
SLIPS = (-10, -3, -2, -1, 1, 2, 3, 10)
BRANCHES = ("told", "gains", "losses")


@dataclass(frozen=True)
class Piece:
    """A stretch of text; `planted` marks a number that is deliberately wrong and must not be learnt."""

    text: str
    planted: bool = False


@dataclass(frozen=True)
class Problem:
    """One problem: the arithmetic (`start`, signed `events`), the words, and the four choices with the right letter."""

    name: str
    item: str
    start: int
    events: tuple[int, ...]
    question: str
    choices: tuple[str, ...]
    answer: str

    @property
    def result(self) -> int:
        return self.start + sum(self.events)


def ordered(events: tuple[int, ...], branch: str) -> tuple[tuple[str, int], ...]:
    """The days and events in the order in which `branch` ("told", "gains", "losses") works through them."""
    dated = tuple(zip(w.DAYS, events))
    gains = tuple(pair for pair in dated if pair[1] > 0)
    losses = tuple(pair for pair in dated if pair[1] < 0)
    return {"told": dated, "gains": gains + losses, "losses": losses + gains}[branch]


def totals(start: int, dated: tuple[tuple[str, int], ...]) -> list[int]:
    """The running totals after each event."""
    running = [start]
    for _, event in dated:
        running.append(running[-1] + event)
    return running[1:]


def held_out(start: int, events: tuple[int, ...]) -> bool:
    """Whether this arithmetic is in the held-out sixteenth: a hash decides, so training and tasks share no problem."""
    digest = hashlib.sha256(repr((start, tuple(events))).encode("ascii")).digest()
    return digest[0] % HELD_OUT_BUCKETS == 0


def draw_arithmetic(rng: random.Random, count: int) -> tuple[int, tuple[int, ...]]:
    """A start of 6-40 and `count` events of distinct size 2-9, at least one gain and one loss.

    Every partial total is 1-60 in all three orders.
    """
    while True:
        start = rng.randint(6, 40)
        events = tuple(size * rng.choice((1, -1)) for size in rng.sample(range(2, 10), count))
        if not any(event > 0 for event in events) or not any(event < 0 for event in events):
            continue
        running = [total for branch in BRANCHES for total in totals(start, ordered(events, branch))]
        if min(running) >= SMALLEST_TOTAL and max(running) <= LARGEST_TOTAL:
            return start, events


def draw_choices(rng: random.Random, result: int, events: tuple[int, ...]) -> list[int]:
    """Four different numbers in random order: the result, a forgotten event, a reversed event and a small slip."""
    chosen = [result]
    forgotten = [result - event for event in events]
    turned = [result - 2 * event for event in events]
    slipped = [result + slip for slip in SLIPS]
    for candidates in (forgotten, turned, slipped):
        fresh = [number for number in candidates if 0 <= number <= w.LARGEST and number not in chosen]
        while not fresh:  # every one was taken or out of range: another small slip
            number = result + rng.randint(-12, 12)
            fresh = [number] if 0 <= number <= w.LARGEST and number not in chosen else []
        chosen.append(rng.choice(fresh))
    rng.shuffle(chosen)
    return chosen


def draw_problem(
    rng: random.Random, most_events: int = MOST_EVENTS, most_fillers: int = MOST_FILLERS, holdout: bool = False
) -> Problem:
    """One problem of the training side (`holdout`: of the held-out side) with at most so many events and fillers."""
    start, events = draw_arithmetic(rng, rng.randint(FEWEST_EVENTS, most_events))
    while held_out(start, events) != holdout:
        start, events = draw_arithmetic(rng, rng.randint(FEWEST_EVENTS, most_events))
    name, item = rng.choice(w.NAMES), rng.choice(w.OBJECTS)
    result = start + sum(events)
    numbers = draw_choices(rng, result, events)
    choices = tuple(f"{number} {item}" for number in numbers)
    question = draw_question(rng, name, item, start, events, most_fillers)
    return Problem(name, item, start, events, question, choices, w.LETTERS[numbers.index(result)])


def draw_question(
    rng: random.Random, name: str, item: str, start: int, events: tuple[int, ...], most_fillers: int
) -> str:
    """The story: the start, one event a day from Monday on, filler sentences among them, and the question."""
    she = name in w.SHE_NAMES
    pronoun, possessive = ("She", "her") if she else ("He", "his")
    words = {"N": name, "o": item, "P": pronoun, "h": possessive, "s": start}
    sentences = []
    for day, event in zip(w.DAYS, events):
        verb = rng.choice(w.GAIN_VERBS if event > 0 else w.LOSS_VERBS)
        opening = f"{rng.choice(w.EVENT_OPENINGS)} {day} {pronoun.lower()}"
        sentences.append(f"{opening} {verb} {abs(event)} {rng.choice(w.TAILS)}.")
    fillers = [text.format(**words) for text in rng.sample(w.FILLERS, rng.randint(0, most_fillers))]
    for filler in fillers:
        sentences.insert(rng.randint(0, len(sentences)), filler)
    return " ".join([rng.choice(w.STARTS).format(**words), *sentences, rng.choice(w.QUESTIONS).format(**words)])


def branch_pieces(rng: random.Random, problem: Problem, branch: str, slip: bool = False) -> tuple[list[Piece], int]:
    """One branch's text and its result; with `slip` one total is off by 1-3 or 10 and the later steps follow it."""
    words = {"N": problem.name, "o": problem.item}
    dated = ordered(problem.events, branch)
    events = [event for _, event in dated]
    slip_at = rng.randrange(len(events)) if slip else -1
    intro = f"{rng.choice(w.BRANCH_INTROS[branch])} {rng.choice(w.BRANCH_STARTS).format(s=problem.start, **words)}"
    pieces, total = [Piece(intro)], problem.start
    for index, (day, event) in enumerate(dated):
        if branch != "told" and index and (event > 0) != (events[index - 1] > 0):
            pieces.append(Piece(" " + rng.choice(w.TURNS["gains" if event > 0 else "losses"])))
        step, sign = (rng.choice(w.GAIN_STEPS), "+") if event > 0 else (rng.choice(w.LOSS_STEPS), "-")
        before, total = total, total + event
        if index == slip_at:
            total = rng.choice([total + off for off in SLIPS if 0 <= total + off <= LARGEST_TOTAL])
        size = abs(event)
        told = f" {rng.choice(w.STEP_OPENINGS)}{day} {step} {size}, {rng.choice(w.EQUATIONS)}"
        pieces += [Piece(f"{told} {before} {sign} {size} ="), Piece(f" {total}", planted=index == slip_at), Piece(".")]
        if not 0 <= total <= w.LARGEST or (total + sum(events[index + 1 :]) < 0):
            return branch_pieces(rng, problem, branch, slip)  # the slip led out of range: draw another
    pieces.append(Piece(" " + rng.choice(w.BRANCH_ENDS).format(s=total, **words)))
    return pieces, total


def kept_result(results: tuple[int, int, int]) -> int:
    """The majority of three results; where all differ, the first."""
    first, second, third = results
    return second if second == third else first


def merge_pieces(rng: random.Random, problem: Problem, results: tuple[int, int, int]) -> tuple[list[Piece], str]:
    """Merge's text for three branch results, and the letter it arrives at (the nearest choice where none fits)."""
    kept, ordinals = kept_result(results), rng.choice(w.ORDINALS)
    first, second, third = (f"{order} {result}" for order, result in zip(ordinals, results, strict=True))
    quotes = f"{first}{rng.choice(w.SEPARATORS)}{second}{rng.choice(w.SEPARATORS)}{third}"
    agreement = {1: w.AGREE_ALL, 2: w.AGREE_TWO, 3: w.AGREE_NONE}[len(set(results))]
    lines = [f"{rng.choice(w.MERGE_OPENINGS)} {quotes}. {rng.choice(agreement)} {kept} {problem.item}."]
    numbers = [int(choice.split()[0]) for choice in problem.choices]
    for letter, number in zip(w.LETTERS, numbers, strict=True):
        verdict = rng.choice(w.SAME if number == kept else w.OTHER)
        lines.append(f"{letter}. {number} {problem.item}, {rng.choice(w.OUR_VERBS)} {kept}, {verdict}.")
    nearest = min(range(4), key=lambda index: (abs(numbers[index] - kept), index))
    lines.append(f"{rng.choice(w.CONCLUSIONS if kept in numbers else w.NEAREST)} {w.LETTERS[nearest]}.")
    return [Piece("\n".join(lines))], w.LETTERS[nearest]


def answer_pieces(rng: random.Random, letter: str) -> list[Piece]:
    """The answer block's text."""
    return [Piece(rng.choice(w.ANSWERS).format(s=letter))]
