"""What every measurement of the benchmark works with, and the form in which each returns what it found."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from cache.digest import tensor_sha256
from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, Arm
from experiments.benchmark.floor import FLOORED, Floor
from experiments.benchmark.machine import StreamingRead
from experiments.benchmark.timing import Rounds, Sample, Stopwatch, interleaved
from experiments.benchmark.workload import Workload
from minimodel.config import ModelConfig
from minimodel.numerics import NumericContract

READ = "streaming read"


@dataclass(frozen=True)
class Measured:
    """One row of the table. seconds: samples by arm, taken in pairs. bits: a digest of what each arm computed. load:
    the machine's, before and after. totals: what the table shows where a sample is only a part of it. floors: samples
    of each arm's floor. read: seconds a byte of the streaming read, in the same rounds; bytes: what one sample must
    read. tokens: of one copy a sample, where tokens/s are shown; else unit says "ms" or "s".
    """

    name: str
    unit: str
    seconds: Rounds
    bits: dict[str, str]
    load: tuple[float, float]
    totals: Rounds = field(default_factory=dict)
    floors: Rounds = field(default_factory=dict)
    read: list[float] = field(default_factory=list)
    bytes: int | None = None
    tokens: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """Samples of arms and of their floors, taken in one set of rounds, and the streaming read's where it was in it."""

    seconds: Rounds
    floors: Rounds
    read: list[float]


@dataclass(frozen=True)
class Bench:
    """What every measurement needs. repeats: rounds of the short ones; long_repeats: of builds, whole rows and loads.
    steps: decode steps a sample. block: tokens of a build between two turns. note: progress, one line each.
    """

    arms: Sequence[Arm]
    contract: Contract
    numeric: NumericContract
    repeats: int
    long_repeats: int
    steps: int
    block: int
    read: StreamingRead
    note: Callable[[str], None]

    @property
    def config(self) -> ModelConfig:
        return self.arms[0].model.config

    def work(self, length: int) -> Workload:
        return Workload.of(self.contract, length, self.numeric.torch_device)

    def watch(self) -> Stopwatch:
        return Stopwatch(self.numeric.torch_device)

    def floors(self, length: int, key_length: int, mask: Tensor) -> dict[str, Floor]:
        """The floor of every column of ours that has one, by the arm's name."""
        floored = [arm for arm in self.arms if arm.name in COLUMNS and arm.kernel in FLOORED]
        return {arm.name: Floor(arm.model, length, key_length, mask) for arm in floored}

    def in_turn(self, sample: Callable[[Arm], float], floors: dict[str, Floor], calls: int, read: bool) -> Taken:
        """The short rounds: every arm, every floor called `calls` times, and the streaming read where it is asked for.

        sample(arm) prepares untimed, runs, and returns seconds a unit; a floor gives seconds a call.
        """
        samples: dict[str, Sample] = {arm.name: partial(sample, arm) for arm in self.arms}
        samples |= {floor_of(name): partial(self._timed, floor, calls) for name, floor in floors.items()}
        found = interleaved({**samples, READ: self.read} if read else samples, self.repeats)
        return Taken(
            {arm.name: found[arm.name] for arm in self.arms},
            {name: found[floor_of(name)] for name in floors},
            found.get(READ, []),
        )

    def _timed(self, floor: Floor, calls: int) -> float:
        watch = self.watch()
        with watch:
            for _ in range(calls):
                floor()
        return watch.seconds / calls


def floor_of(name: str) -> str:
    """The floor's name among the samples."""
    return f"floor of {name}"


def prefilled(arm: Arm, work: Workload, length: int, capacity: int | None = None) -> tuple[Any, Tensor]:
    """A cache of the first `length` tokens made in one call, and the logits [B, 1, V] of the last."""
    cache = arm.new_cache(capacity or length)
    hidden = arm.model(*work.call(length), cache)
    return cache, arm.model.logits(hidden[:, -1:])


def digest(arm: Arm, cache: Any, logits: Tensor) -> str:
    """One digest of logits and all K/V: equal exactly when every raw bit is."""
    outer = hashlib.sha256()
    for tensor in (logits, *arm.tensors(cache)):
        outer.update(bytes.fromhex(tensor_sha256(tensor)))
    return outer.hexdigest()
