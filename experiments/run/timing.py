"""Timing: samples taken in turn, so that other load on the machine affects all of them, and the read bandwidth."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch

T = TypeVar("T")
Sample = Callable[[], float]  # prepares untimed, runs, and returns seconds per unit
Rounds = dict[str, list[float]]  # arm: one sample per round


class SpreadEntry(TypedDict):
    """A `Spread` in JSON."""

    median: float
    quartiles: list[float]
    n: int


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples or of ratios."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Returns the spread of samples, with inclusive quartiles. One sample is its own median and quartiles."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(statistics.median(samples), low, high, len(samples))

    def as_dict(self) -> SpreadEntry:
        return {"median": self.median, "quartiles": [self.low, self.high], "n": self.n}


def interleaved(samples: Mapping[str, Sample], repeats: int, warm_up: int = 1) -> Rounds:
    """Returns the samples of `repeats` rounds after `warm_up` dropped ones. Each round begins with another arm."""
    names = list(samples)
    found: Rounds = {name: [] for name in names}
    for number in range(warm_up + repeats):
        for name in rotated(names, number):
            seconds = samples[name]()
            if number >= warm_up:
                found[name].append(seconds)
    return found


def rotated(arms: Sequence[T], number: int) -> list[T]:
    """Returns the arms in order, starting at arm `number` modulo their count."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def ratios(base: Sequence[float], other: Sequence[float]) -> Spread:
    """Returns base / other, round by round: how many times as fast the other is."""
    return Spread.of([left / right for left, right in zip(base, other, strict=True)])


class Stopwatch:
    """`with watch: ...` adds the elapsed seconds. It waits for the device's pending work at both ends."""

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


def load() -> float:
    """Returns the load average of the last minute, which includes other processes."""
    return round(os.getloadavg()[0], 2)


class StreamingRead:
    """Measures read bandwidth by one pass over a large buffer. A sample is in seconds per byte.

    Of several reductions the fastest on this machine is measured; the slower ones are bound by arithmetic.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """size: bytes of the buffer, a multiple of 8; it should be far beyond what a cache holds."""
        buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        left, right = buffer.chunk(2)
        ways: dict[str, Callable[[], Any]] = {
            "sum of float32": buffer.sum,
            "sum of int64": buffer.view(torch.int64).sum,
            "dot product of float32": lambda: torch.dot(left, right),
        }
        self._device, self._size = device, size
        tried = {way: min(self._seconds(ways[way]) for _ in range(3)) for way in ways}
        self.way = min(tried, key=lambda way: tried[way])
        self._read = ways[self.way]

    def __call__(self) -> float:
        return self._seconds(self._read) / self._size

    def _seconds(self, read: Callable[[], Any]) -> float:
        watch = Stopwatch(self._device)
        with watch:
            read()
        return watch.seconds
