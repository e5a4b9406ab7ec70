"""Steps of several requests taken together, each with the bits it has alone (see `decode.together`).

Requests may differ in length, block and role. Each has its own cache, record, structure, margins and failure. One that
ends leaves its place to the next at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.greedy import Choice, Step, Stepped, Steps, best_two, take
from decode.together import Request, step_together
from minimodel.bits import COPIES, RowFailure, bits
from minimodel.decoder import Decoder


class Clock(Protocol):
    """Counts one request's time: its own work between `start` and `stop`, and its share of common steps."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def share(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Job:
    """One request to run."""

    name: Any  # given back with its result
    steps: Steps[Any]
    clock: Clock


class _Place:
    """A job in flight and its next step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step: Step | None = None  # None once the job has ended
        self.result: Any = None  # the value that its steps returned, or the RowFailure that ended them
        self.resume(None)

    def resume(self, stepped: Stepped | RowFailure | None) -> None:
        """Sends in what the step gave, None at the start, and runs to the next step or the end."""
        self.job.clock.start()
        try:
            if isinstance(stepped, RowFailure):
                self.step = self.job.steps.throw(stepped)
            else:
                self.step = next(self.job.steps) if stepped is None else self.job.steps.send(stepped)
        except StopIteration as end:
            self.step, self.result = None, end.value
        except RowFailure as failure:
            self.step, self.result = None, failure
        self.job.clock.stop()


@torch.inference_mode()
def in_flight(jobs: Iterator[Job], size: int, together: Decoder) -> Iterator[tuple[Any, Any]]:
    """Runs jobs, at most `size` at a time, and yields the name of each with its result or its RowFailure as it ends.

    `together` is what `step_together` takes for the jobs' model. A job is drawn from `jobs` when a place is free and
    the results before it have been taken. A step that is observed, or has another number of copies, is taken alone.
    """
    places: list[_Place] = []
    while True:
        while len(places) < size and (job := next(jobs, None)) is not None:
            places.append(_Place(job))
        if not places:
            return
        due = [place for place in places if place.step is not None]
        joined = [place for place in due if joins(place.step)]
        joined = joined if len(joined) > 1 else []
        for place in due:
            if place not in joined:
                _take_alone(place)
        if joined:
            _take_joined(joined, together)
        for place in [place for place in places if place.step is None]:
            places.remove(place)
            yield place.job.name, place.result


def joins(step: Step | None) -> bool:
    """Returns whether the step may be taken with others: it has two copies and no observer."""
    return step is not None and step.observe is None and step.stepper.copies == COPIES


def _take_alone(place: _Place) -> None:
    assert place.step is not None
    start = perf_counter()
    stepped: Stepped | RowFailure
    try:
        stepped = take(place.step)
    except RowFailure as failure:
        stepped = failure
    place.job.clock.share(perf_counter() - start)
    place.resume(stepped)


def _take_joined(places: Sequence[_Place], together: Decoder) -> None:
    start = perf_counter()
    found = take_together([place.step for place in places if place.step is not None], together)
    share = (perf_counter() - start) / len(places)
    for place, stepped in zip(places, found, strict=True):
        place.job.clock.share(share)
        place.resume(stepped)


def take_together(steps: Sequence[Step], together: Decoder) -> list[Stepped | RowFailure]:
    """Runs one step of each of several requests of one model: what `take` gives for each, or its RowFailure."""
    requests = [
        Request(*step.stepper.call(step.token, step.role), step.stepper.cache, step.stepper.record.enter)
        for step in steps
    ]
    hidden = step_together(together, requests).split(COPIES)
    choosing = [number for number, step in enumerate(steps) if step.eligible is not None]
    choices: dict[int, Choice | RowFailure] = {}
    if choosing:
        logits = together.logits(torch.cat([hidden[number] for number in choosing])).unflatten(0, (-1, COPIES))
        eligible = torch.stack([mask for step in steps if (mask := step.eligible) is not None])
        choices = dict(zip(choosing, best_two_each(logits[:, :, 0], eligible), strict=True))
    found: list[Stepped | RowFailure] = []
    for number, after in enumerate(hidden):
        choice = choices.get(number)
        found.append(choice if isinstance(choice, RowFailure) else (after, choice))
    return found


def best_two_each(logits: Tensor, eligible: Tensor) -> list[Choice | RowFailure]:
    """Returns `best_two` of every request from a few calls: logits [K, 2, V], eligible bool [K, V].

    For a request with unequal copies or no finite choice it returns the RowFailure of `best_two` itself.
    """
    first = logits[:, 0]
    equal = (bits(logits[:, 1]) == bits(first)).all(dim=-1)
    low, high = torch.aminmax(first, dim=-1)
    masked = first.masked_fill(~eligible, float("-inf"))
    best = masked.argmax(dim=-1, keepdim=True)  # the first of equal maxima, as in `best_two`
    top = masked.gather(-1, best)[:, 0]
    second = masked.scatter(-1, best, float("-inf")).amax(dim=-1)
    sound = equal & torch.isfinite(low) & torch.isfinite(high) & torch.isfinite(top)
    columns = (part.tolist() for part in (sound, best[:, 0], top, second))
    found: list[Choice | RowFailure] = []
    for number, (good, *choice) in enumerate(zip(*columns)):
        found.append((choice[0], choice[1], choice[2]) if good else _amiss(logits[number], eligible[number]))
    return found


def _amiss(logits: Tensor, eligible: Tensor) -> Choice | RowFailure:
    try:
        return best_two(logits, eligible)
    except RowFailure as failure:
        return failure
