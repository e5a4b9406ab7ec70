"""Steps of several requests taken together, each with the bits it has alone (see `decode.together`).

Requests may differ in length, block and role. Each has its own cache, record, structure, margins and failure. One that
ends leaves its place to the next at once.
"""

from collections.abc import Callable, Iterator, Sequence
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

    `together`: the decoder for joint steps (`decode.independence.Together.model`). A job is drawn from `jobs` when a
    place is free and the results before it have been taken. A step that is observed, or has another number of copies,
    is taken alone.
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
        for group in [[place] for place in due if place not in joined] + ([joined] if joined else []):
            start = perf_counter()
            steps = [place.step for place in group if place.step is not None]
            found = take_together(steps, together) if group is joined else [_outcome(take, steps[0])]
            share = (perf_counter() - start) / len(group)
            for place, stepped in zip(group, found, strict=True):
                place.job.clock.share(share)
                place.resume(stepped)
        for place in [place for place in places if place.step is None]:
            places.remove(place)
            yield place.job.name, place.result


def joins(step: Step | None) -> bool:
    """Returns whether the step may be taken with others: it has two copies and no observer."""
    return step is not None and step.observe is None and step.stepper.copies == COPIES


def _outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the function's value, or the RowFailure that it raised."""
    try:
        return function(*arguments)
    except RowFailure as failure:
        return failure


def take_together(steps: Sequence[Step], together: Decoder) -> list[Stepped | RowFailure]:
    """Runs one step of each of several requests of one model: what `take` gives for each, or its RowFailure."""
    requests = [
        Request(*step.stepper.call(step.token, step.role), step.stepper.cache, step.stepper.record.enter)
        for step in steps
    ]
    hidden = step_together(together, requests).split(COPIES)
    masks = {number: step.eligible for number, step in enumerate(steps) if step.eligible is not None}
    choices: dict[int, Choice | RowFailure] = {}
    if masks:
        logits = together.logits(torch.cat([hidden[number] for number in masks])).unflatten(0, (-1, COPIES))
        choices = dict(zip(masks, best_two_each(logits[:, :, 0], torch.stack([*masks.values()])), strict=True))
    made = ((after, choices.get(number)) for number, after in enumerate(hidden))
    return [choice if isinstance(choice, RowFailure) else (after, choice) for after, choice in made]


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
    return [
        (token, first, next_best) if good else _outcome(best_two, logits[number], eligible[number])
        for number, (good, token, first, next_best) in enumerate(zip(*columns))
    ]
