"""The measurements: each takes the arms through the same work in turn and returns one `Measured`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cache.digest import tensor_sha256
from decode.contract import Contract
from decode.state import State
from decode.stepper import Stepper
from experiments.benchmarking.arms import COLUMNS, Arm
from experiments.benchmarking.floor import FLOORED, Floor
from experiments.benchmarking.machine import StreamingRead, load
from experiments.benchmarking.timing import Rounds, Sample, Stopwatch, interleaved, rotated
from experiments.benchmarking.workload import Workload
from experiments.harness.canonical import canonical, sha256_text
from experiments.harness.tasks import Task
from experiments.planning.estimates import COPIES, prefill_cost, step_bytes
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

    def timed(self, floor: Floor, calls: int) -> float:
        """Seconds a call."""
        watch = self.watch()
        with watch:
            for _ in range(calls):
                floor()
        return watch.seconds / calls


@torch.inference_mode()
def decode(bench: Bench, context: int) -> Measured:
    """Seconds a step, the token through the decoder and its logits: the steps that take the cache to `context`."""
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
    samples: dict[str, Sample] = {arm.name: partial(sample, arm) for arm in bench.arms}
    samples |= {floor_of(name): partial(bench.timed, floor, bench.steps) for name, floor in floors.items()}
    found = interleaved({**samples, READ: bench.read}, bench.repeats)
    return Measured(
        f"decode, context {context}",
        "ms",
        {arm.name: found[arm.name] for arm in bench.arms},
        bits,
        (before, load()),
        floors={name: found[floor_of(name)] for name in floors},
        read=found[READ],
        bytes=step_bytes(bench.config, bench.numeric.dtype, context),
        detail={"context": context, "steps": bench.steps, "read": bench.read.way},
    )


@torch.inference_mode()
def prefill(bench: Bench, length: int) -> Measured:
    """Seconds of one call of `length` tokens of both copies, the allocation of its cache and the last logits in it."""
    bench.note(f"prefill, {length} tokens")
    before, work = load(), bench.work(length)
    bits: dict[str, str] = {}
    mask = work.call(length)[3]

    def sample(arm: Arm) -> float:
        watch = bench.watch()
        with watch:
            cache, logits = prefilled(arm, work, length)
        if arm.name not in bits:
            bits[arm.name] = digest(arm, cache, logits)
        return watch.seconds

    floors = bench.floors(length, length, mask)
    samples: dict[str, Sample] = {arm.name: partial(sample, arm) for arm in bench.arms}
    samples |= {floor_of(name): partial(bench.timed, floor, 1) for name, floor in floors.items()}
    found = interleaved(samples, bench.repeats)
    return Measured(
        f"prefill, {length} tokens",
        "tokens/s",
        {arm.name: found[arm.name] for arm in bench.arms},
        bits,
        (before, load()),
        floors={name: found[floor_of(name)] for name in floors},
        tokens=length,
        detail={"length": length, "flops": prefill_cost(bench.config, bench.numeric.dtype, length).flops},
    )


@torch.inference_mode()
def build(bench: Bench, length: int, repeats: int) -> Measured:
    """Seconds of an incremental build of `length` tokens, without logits until the last.

    The arms take turns block by block, so that a build of minutes is still compared in pairs: a sample is one block.
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
    """Seconds of one whole row of the retained-live matrix, digests and comparisons in it; bits: the ledger's line."""
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
