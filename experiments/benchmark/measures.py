"""The measurements: each runs the arms through the same work in turn and returns one `Measured`."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cache.digest import tensor_sha256
from decode.contract import Contract
from decode.state import State
from decode.stepper import Stepper
from experiments.benchmark.arms import COLUMNS, FLOORED, Arm, Floor, Workload
from experiments.run.costs import (
    Rounds,
    Sample,
    Stopwatch,
    StreamingRead,
    interleaved,
    load,
    prefill_cost,
    rotated,
    step_bytes,
)
from experiments.run.ledger import canonical, sha256_text
from experiments.run.tasks import Task
from minimodel.bits import COPIES
from minimodel.config import ModelConfig
from minimodel.numerics import NumericContract

READ = "streaming read"


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    name: str
    unit: str  # "ms", "s" or "tokens/s"
    seconds: Rounds  # samples by arm, taken in the same rounds
    bits: dict[str, str]  # arm: digest of what it computed
    load: tuple[float, float]  # the machine's load average before and after
    totals: Rounds = field(default_factory=dict)  # shown instead of `seconds` where a sample is only a part
    floors: Rounds = field(default_factory=dict)  # samples of each arm's floor
    read: list[float] = field(default_factory=list)  # seconds per byte of the streaming read, in the same rounds
    bytes: int | None = None  # that one sample must read
    tokens: int | None = None  # per copy and sample, where the unit is tokens/s
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """Samples of arms, of their floors and of the streaming read (empty where not taken), from the same rounds."""

    seconds: Rounds
    floors: Rounds
    read: list[float]


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    arms: Sequence[Arm]
    contract: Contract
    numeric: NumericContract
    repeats: int  # rounds of decode steps and prefills
    long_repeats: int  # rounds of builds, whole rows and loads
    steps: int  # decode steps per sample
    block: int  # tokens of a build per turn
    read: StreamingRead
    note: Callable[[str], None]  # writes one line of progress

    @property
    def config(self) -> ModelConfig:
        return self.arms[0].model.config

    def work(self, length: int) -> Workload:
        return Workload.of(self.contract, length, self.numeric.torch_device)

    def watch(self) -> Stopwatch:
        return Stopwatch(self.numeric.torch_device)

    def floors(self, length: int, key_length: int, mask: Tensor) -> dict[str, Floor]:
        """Returns the floor of each of our columns that has one, by the arm's name."""
        floored = [arm for arm in self.arms if arm.name in COLUMNS and arm.kernel in FLOORED]
        return {arm.name: Floor(arm.model, length, key_length, mask) for arm in floored}

    def in_turn(self, sample: Callable[[Arm], float], floors: dict[str, Floor], calls: int, read: bool) -> Taken:
        """Returns the samples of `repeats` rounds of every arm, every floor and, where `read`, the streaming read.

        sample(arm) prepares untimed, runs, and returns seconds per unit. A floor runs `calls` times: seconds per call.
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
    """Returns the floor's name among the samples."""
    return f"floor of {name}"


def prefilled(arm: Arm, work: Workload, length: int, capacity: int | None = None) -> tuple[Any, Tensor]:
    """Returns a cache of the first `length` tokens, made in one call, and the logits [B, 1, V] of the last."""
    cache = arm.new_cache(capacity or length)
    hidden = arm.model(*work.call(length), cache)
    return cache, arm.model.logits(hidden[:, -1:])


def digest(arm: Arm, cache: Any, logits: Tensor) -> str:
    """Returns one digest of logits and all K/V, equal exactly where every raw bit is."""
    return tensors_digest((logits, *arm.tensors(cache)))


def tensors_digest(tensors: Iterable[Tensor], head: bytes = b"") -> str:
    """Returns one digest of `head` and the raw bits of tensors in order."""
    outer = hashlib.sha256(head)
    for tensor in tensors:
        outer.update(bytes.fromhex(tensor_sha256(tensor)))
    return outer.hexdigest()


@torch.inference_mode()
def decode(bench: Bench, context: int) -> Measured:
    """Measures seconds per decode step, logits included, over the steps that fill the cache to `context` tokens."""
    bench.note(f"decode, context {context}")
    before, work, start = load(), bench.work(context), context - bench.steps - 1
    record, bits = work.record(start), {}
    held = {arm.name: prefilled(arm, work, start)[0] for arm in bench.arms}

    def sample(arm: Arm) -> float:
        cache = arm.copy_cache(held[arm.name], context)
        stepper, watch = Stepper(arm.model, cache, COPIES, context), bench.watch()
        stepper.resume(work.roles[:start], record)
        stepper.feed(work.tokens[start], work.roles[start])  # untimed: the first step meets a cold cache
        with watch:
            for token, role in work.steps(start + 1, context):
                logits = arm.model.logits(stepper.feed(token, role))
        if arm.name not in bits:
            bits[arm.name] = digest(arm, cache, logits)
        return watch.seconds / bench.steps

    floors = bench.floors(1, context, work.call(context)[3][:, :, -1:])
    taken = bench.in_turn(sample, floors, bench.steps, read=True)
    return Measured(
        f"decode, context {context}",
        "ms",
        taken.seconds,
        bits,
        (before, load()),
        floors=taken.floors,
        read=taken.read,
        bytes=step_bytes(bench.config, bench.numeric.dtype, context),
        detail={"context": context, "steps": bench.steps, "read": bench.read.way},
    )


@torch.inference_mode()
def prefill(bench: Bench, length: int) -> Measured:
    """Measures one call of `length` tokens of both copies, with the cache's allocation and the last logits."""
    bench.note(f"prefill, {length} tokens")
    before, work = load(), bench.work(length)
    bits: dict[str, str] = {}

    def sample(arm: Arm) -> float:
        watch = bench.watch()
        with watch:
            cache, logits = prefilled(arm, work, length)
        if arm.name not in bits:
            bits[arm.name] = digest(arm, cache, logits)
        return watch.seconds

    taken = bench.in_turn(sample, bench.floors(length, length, work.call(length)[3]), 1, read=False)
    return Measured(
        f"prefill, {length} tokens",
        "tokens/s",
        taken.seconds,
        bits,
        (before, load()),
        floors=taken.floors,
        tokens=length,
        detail={"length": length, "flops": prefill_cost(bench.config, bench.numeric.dtype, length).flops},
    )


@torch.inference_mode()
def build(bench: Bench, length: int, repeats: int) -> Measured:
    """Measures an incremental build of `length` tokens, with logits of the last alone.

    A sample is one block: the arms take turns block by block, so that load on the machine affects all of them.
    """
    ends = [*range(bench.block, length, bench.block), length]
    before, work, bits = load(), bench.work(length), {}
    seconds: Rounds = {arm.name: [] for arm in bench.arms}
    for number in range(repeats):
        held: list[int] = []
        steppers = {arm.name: Stepper(arm.model, arm.new_cache(length), COPIES, length) for arm in bench.arms}
        for index, (start, stop) in enumerate(zip([0, *ends], ends)):
            bench.note(f"incremental build {number + 1} of {repeats}, {start} of {length} tokens")
            for arm in rotated(bench.arms, index + number):
                stepper, watch = steppers[arm.name], bench.watch()
                with watch:
                    for token, role in work.steps(start, stop):
                        hidden = stepper.feed(token, role)
                    logits = arm.model.logits(hidden) if stop == length else None
                seconds[arm.name].append(watch.seconds)
                if logits is not None and arm.name not in bits:
                    bits[arm.name] = digest(arm, stepper.cache, logits)
            held.append(sum(t.nbytes for t in bench.arms[0].tensors(steppers[bench.arms[0].name].cache)))
    totals = {
        name: [sum(found[at : at + len(ends)]) for at in range(0, len(found), len(ends))]
        for name, found in seconds.items()
    }
    detail = {"length": length, "builds": repeats, "ends": ends, "cache_bytes": held}
    name = f"incremental build, {length} tokens"
    return Measured(name, "s", seconds, bits, (before, load()), totals=totals, detail=detail)


def matrix(bench: Bench, task: Task, prompt: State) -> Measured:
    """Measures one row of the retained-live matrix with digests and comparisons. bits: of the ledger line."""
    bench.note(f"matrix row {task.id}")
    before, bits, lengths = load(), {}, {}

    def sample(arm: Arm) -> float:
        watch = bench.watch()
        with watch:
            row = arm.row(task, prompt)
        bits[arm.name] = sha256_text(canonical(row))
        lengths[arm.name] = [row["prefix"]["length"], *(len(one["suffix"]) for one in row["arms"].values())]
        return watch.seconds

    found = interleaved({arm.name: partial(sample, arm) for arm in bench.arms}, bench.long_repeats)
    detail = {"row": task.id, "lengths": lengths}
    return Measured("matrix row", "s", found, bits, (before, load()), detail=detail)
