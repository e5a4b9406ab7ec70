"""Samples of several arms taken in turn, so that whatever else the machine does meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Sample = Callable[[], float]  # prepares untimed, runs, and returns seconds a unit
Rounds = dict[str, list[float]]  # arm to one sample a round


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one arm's samples, or of ratios."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The quartiles are the inclusive ones; of one sample, all three are that one."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(statistics.median(samples), low, high, len(samples))

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "quartiles": [self.low, self.high], "n": self.n}


def interleaved(samples: Mapping[str, Sample], repeats: int, warm_up: int = 1) -> Rounds:
    """`repeats` rounds after `warm_up` rounds that are thrown away; each round begins with another arm."""
    names = list(samples)
    found: Rounds = {name: [] for name in names}
    for number in range(warm_up + repeats):
        for name in rotated(names, number):
            seconds = samples[name]()
            if number >= warm_up:
                found[name].append(seconds)
    return found


def rotated(arms: Sequence[T], number: int) -> list[T]:
    """The arms in order, beginning with another one in every round."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def ratios(base: Sequence[float], other: Sequence[float]) -> Spread:
    """base over other, round by round: how many times as fast the other is."""
    return Spread.of([left / right for left, right in zip(base, other, strict=True)])


class Stopwatch:
    """`with watch: ...` adds the seconds between; a device's pending work is waited for at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
