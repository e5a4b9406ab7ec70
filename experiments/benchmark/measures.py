"""The timed measurements. Each runs every arm on the same work in turn and returns its entry of benchmark.json."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from cache.digest import tensor_sha256
from decode.contract import Contract
from decode.record import FunctionalRecord
from decode.state import State
from decode.stepper import Stepper
from experiments.benchmark.arms import COLUMNS, FLOORED, Arm, Workload, floor
from experiments.run import costs
from experiments.run.costs import Rounds, Sample, Stopwatch, StreamingRead, interleaved, load, ratios, spread
from experiments.run.ledger import canonical, sha256_text
from experiments.run.tasks import Task
from minimodel.bits import COPIES
from minimodel.config import ModelConfig
from minimodel.numerics import NumericContract

READ = "streaming read"
EQUAL, DIFFERS = "equal", "differs"

Entry = dict[str, Any]
Run = Callable[[Arm, Contract], Any]
Sampled = Callable[[Arm], tuple[float, str]]  # prepares untimed, runs; returns seconds per unit, a digest of the result


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    arms: Sequence[Arm]
    contract: Contract
    numeric: NumericContract
    repeats: int  # rounds of decode steps and prefills
    long_repeats: int  # rounds of builds, matrix rows, batches and loads
    steps: int  # decode steps per sample
    block: int  # tokens of a build per sample
    read: StreamingRead
    note: Callable[[str], None]  # writes one line of progress
    fresh: Callable[[str, Run], Entry]  # returns `peaks` of the named arm, measured in a fresh process

    @property
    def config(self) -> ModelConfig:
        return self.arms[0].model.config

    @cached_property
    def baseline(self) -> str:
        """The column that the others are compared with: the reference if there is one, else our first."""
        return next((arm.name for arm in self.arms if arm.name not in COLUMNS), self.arms[0].name)

    @property
    def required(self) -> list[tuple[str, str]]:
        """Pairs of a column and another whose bits it must have: its plain form, and a reference with its kernel."""
        found = []
        for arm in self.arms:
            attention, linear = COLUMNS.get(arm.name, ("", ""))
            if linear == "plain" or (linear == "packed" and self.numeric.dtype != "fp32"):
                for other in self.arms:
                    plain = linear == "packed" and COLUMNS.get(other.name) == (attention, "plain")
                    if plain or (other.name not in COLUMNS and other.kernel == attention):
                        found.append((arm.name, other.name))
        return found

    def work(self, length: int) -> Workload:
        return Workload.of(self.contract, length, self.numeric.torch_device)

    def watch(self) -> Stopwatch:
        return Stopwatch(self.numeric.torch_device)


def floor_of(name: str) -> str:
    return f"floor of {name}"


def digest(*tensors: Tensor) -> str:
    """Returns one digest of the raw bits of tensors in order."""
    return sha256_text(" ".join(map(tensor_sha256, tensors)))


def in_turn(
    bench: Bench, name: str, unit: str, repeats: int, sample: Sampled, detail: Entry, mask: Tensor | None = None,
    calls: int = 1, size: int = 0, tokens: int | None = None, parts: int = 1,
) -> Entry:  # fmt: skip
    """Measures every arm in turn and returns one row of benchmark.json. Times are in seconds.

    mask: of the calls whose floor is measured. calls: such calls per sample. size: bytes that a sample must read.
    tokens: tokens per sample. parts: samples that add up to one measurement; with several there is no warm-up round.
    """
    bench.note(name)
    before, bits = load(), {}

    def arm_sample(arm: Arm) -> float:
        seconds, bits[arm.name] = sample(arm)
        return seconds

    def floor_sample(call: Callable[[], None]) -> float:
        with (watch := bench.watch()):
            for _ in range(calls):
                call()
        return watch.seconds / calls

    samples: dict[str, Sample] = {arm.name: partial(arm_sample, arm) for arm in bench.arms}
    for arm in bench.arms:
        if mask is not None and arm.name in COLUMNS and arm.kernel in FLOORED:
            samples[floor_of(arm.name)] = partial(floor_sample, floor(arm.model, mask))
    if size:
        samples[READ] = bench.read
    found = interleaved(samples, repeats * parts, warm_up=int(parts == 1))
    return {
        "name": name,
        "unit": unit,
        "tokens": tokens,
        "load_average": [before, load()],
        "detail": detail,
        **cells(bench, found, bits, parts, size),
        "unequal_bits": [[a, b] for a, b in bench.required if bits[a] != bits[b]],
    }


def cells(bench: Bench, found: Rounds, bits: dict[str, str], parts: int, size: int) -> Entry:
    """Returns `columns` by arm, and `limit`, the time to read `size` bytes. `speed`: times as fast as the baseline."""
    columns: dict[str, Entry] = {}
    for arm in (arm.name for arm in bench.arms):
        whole = [sum(found[arm][at : at + parts]) for at in range(0, len(found[arm]), parts)]
        columns[arm] = {
            "seconds": spread(whole),
            "samples": found[arm],
            "bits": EQUAL if bits[arm] == bits[bench.baseline] else DIFFERS,
            "bits_sha256": bits[arm],
            "speed": ratios(found[bench.baseline], found[arm]),
        }
        if floor_of(arm) in found:
            columns[arm]["floor_seconds"] = spread(found[floor_of(arm)])
            columns[arm]["over_floor"] = ratios(found[arm], found[floor_of(arm)])
    if READ not in found:
        return {"limit": None, "columns": columns}
    seconds = [each * size for each in found[READ]]
    for arm, cell in columns.items():
        cell["over_limit"] = ratios(found[arm], seconds)
    bandwidth = spread([1e-9 / each for each in found[READ]])
    return {"limit": {"bytes": size, "gigabytes_a_second": bandwidth, "seconds": spread(seconds)}, "columns": columns}


def prefilled(arm: Arm, work: Workload, length: int, capacity: int | None = None) -> tuple[Any, Tensor]:
    """Returns a cache of the first `length` tokens, made in one call, and the logits [B, 1, V] of the last."""
    cache = arm.new_cache(capacity or length)
    hidden = arm.model(*work.call(length), cache)
    return cache, arm.model.logits(hidden[:, -1:])


def resumed(arm: Arm, cache: Any, work: Workload, length: int, capacity: int) -> Stepper:
    """Returns a stepper over `cache`, which holds the first `length` tokens of `work`."""
    stepper, roles = Stepper(arm.model, cache, COPIES, capacity), work.roles[:length]
    stepper.resume(roles, FunctionalRecord.of_state(work.tokens[:length], roles, work.contract.rules.visibility))
    return stepper


def decode(bench: Bench, context: int) -> Entry:
    """Measures a decode step, logits included, over the steps that fill the cache to `context` tokens."""
    work, steps = bench.work(context), bench.steps
    start = context - steps - 1
    held = {arm.name: prefilled(arm, work, start)[0] for arm in bench.arms}

    def sample(arm: Arm) -> tuple[float, str]:
        cache = held[arm.name].copy(context)
        stepper = resumed(arm, cache, work, start, context)
        stepper.feed(work.tokens[start], work.roles[start])  # untimed: the first step meets a cold cache
        with (watch := bench.watch()):
            for token, role in work.steps(start + 1, context):
                logits = arm.model.logits(stepper.feed(token, role))
        return watch.seconds / steps, digest(logits, *arm.tensors(cache))

    detail = {"context": context, "steps": steps, "read": bench.read.way}
    mask, size = work.call(context)[3][:, :, -1:], costs.step_bytes(bench.config, bench.numeric.dtype, context)
    return in_turn(bench, f"decode, context {context}", "ms", bench.repeats, sample, detail, mask, steps, size)


def prefill(bench: Bench, length: int) -> Entry:
    """Measures one call of `length` tokens of both copies, with the cache's allocation and the last logits."""
    work = bench.work(length)

    def sample(arm: Arm) -> tuple[float, str]:
        with (watch := bench.watch()):
            cache, logits = prefilled(arm, work, length)
        return watch.seconds, digest(logits, *arm.tensors(cache))

    detail = {"length": length, "flops": costs.prefill_cost(bench.config, bench.numeric.dtype, length).flops}
    name, mask = f"prefill, {length} tokens", work.call(length)[3]
    return in_turn(bench, name, "tokens/s", bench.repeats, sample, detail, mask, tokens=length)


def matrix(bench: Bench, task: Task, prompt: State) -> Entry:
    """Measures one row of the retained-live matrix with digests and comparisons. bits: of the ledger line."""
    lengths: dict[str, list[int]] = {}

    def sample(arm: Arm) -> tuple[float, str]:
        with (watch := bench.watch()):
            row = arm.row(task, prompt)
        lengths[arm.name] = [row["prefix"]["length"], *(len(one["suffix"]) for one in row["arms"].values())]
        return watch.seconds, sha256_text(canonical(row))

    return in_turn(bench, "matrix row", "s", bench.long_repeats, sample, {"row": task.id, "lengths": lengths})


def build(bench: Bench, length: int, repeats: int) -> Entry:
    """Measures an incremental build of `length` tokens, with logits of the last alone.

    A sample is one block: the arms take turns block by block, so that load on the machine affects all of them.
    """
    ends = [*range(bench.block, length, bench.block), length]
    work, first, held = bench.work(length), bench.arms[0], [0] * len(ends)
    steppers: dict[str, Stepper] = {}

    def sample(arm: Arm) -> tuple[float, str]:
        if arm.name not in steppers or steppers[arm.name].length == length:
            steppers[arm.name] = Stepper(arm.model, arm.new_cache(length), COPIES, length)
        stepper = steppers[arm.name]
        at = stepper.length // bench.block
        with (watch := bench.watch()):
            for token, role in work.steps(stepper.length, ends[at]):
                hidden = stepper.feed(token, role)
            logits = [arm.model.logits(hidden)] if ends[at] == length else []
        tensors = arm.tensors(stepper.cache)
        if arm is first:
            bench.note(f"{ends[at]} of {length} tokens")
            held[at] = sum(tensor.nbytes for tensor in tensors)
        return watch.seconds, digest(*logits, *tensors) if logits else ""

    detail = {"length": length, "builds": repeats, "ends": ends, "cache_bytes": held}
    return in_turn(bench, f"incremental build, {length} tokens", "s", repeats, sample, detail, parts=len(ends))


def growth_entry(built: Entry) -> Entry:
    """Returns, per block of one incremental build: its end, seconds per step, seconds so far and bytes of K/V."""
    detail, samples = built["detail"], {name: cell["samples"] for name, cell in built["columns"].items()}
    sizes = [stop - start for start, stop in pairwise([0, *detail["ends"]])]
    return {
        **{key: detail[key] for key in ("length", "ends", "cache_bytes")},
        "step_seconds": {name: [s / k for s, k in zip(found, sizes)] for name, found in samples.items()},
        "total_seconds": {name: list(accumulate(found)) for name, found in samples.items()},
        "load_average": built["load_average"],
    }
