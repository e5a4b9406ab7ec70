"""The measurements. Each runs every arm on the same work in turn and returns its entry of benchmark.json."""

import importlib
import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.digest import tensor_sha256
from decode.batched import Job, in_flight
from decode.contract import Contract
from decode.greedy import Generated, Step, Steps, best_two, generate
from decode.independence import together_here
from decode.record import FunctionalRecord
from decode.state import State, Structure
from decode.stepper import Call, Stepper
from experiments.benchmark.arms import COLUMNS, FLOORED, Arm, Workload, floor, open_ours, open_reference
from experiments.run import costs
from experiments.run.costs import Rounds, Sample, Stopwatch, StreamingRead, interleaved, load, ratios, spread
from experiments.run.exits import one_line
from experiments.run.ledger import canonical, sha256_text
from experiments.run.progress import Progress
from experiments.run.tasks import Task, longest_row
from minimodel.bits import COPIES, RowFailure
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.numerics import NumericContract

READ = "streaming read"
EQUAL, DIFFERS = "equal", "differs"
STEPS = 8  # decode steps of the memory measurement
SIZES = (1, 2, 4, 8, 16)  # rows decoded together
PADDED = ", padded batch"  # of the name of the reference's second series

Entry = dict[str, Any]
TaskRow = tuple[Task, State]  # with the state after its prompt
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


def in_turn(bench: Bench, name: str, unit: str, repeats: int, sample: Sampled, detail: Entry, **more: Any) -> Entry:
    """Measures every arm in turn and returns one row of benchmark.json. Times are in seconds.

    more: `floor`, the mask of the calls whose floor is measured, and `calls`, their number per sample; `bytes` that a
    sample must read; `tokens` per sample; `parts`, the samples that make a whole, of which none is a warm-up.
    """
    bench.note(name)
    before, bits = load(), {}
    calls, parts = more.get("calls", 1), more.get("parts", 1)

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
        if "floor" in more and arm.name in COLUMNS and arm.kernel in FLOORED:
            samples[floor_of(arm.name)] = partial(floor_sample, floor(arm.model, more["floor"]))
    if "bytes" in more:
        samples[READ] = bench.read
    found = interleaved(samples, repeats * parts, warm_up=int(parts == 1))
    return {
        "name": name,
        "unit": unit,
        "tokens": more.get("tokens"),
        "load_average": [before, load()],
        "detail": detail,
        **cells(bench, found, bits, parts, more.get("bytes", 0)),
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
    more = {"floor": work.call(context)[3][:, :, -1:], "calls": steps}
    size = costs.step_bytes(bench.config, bench.numeric.dtype, context)
    return in_turn(bench, f"decode, context {context}", "ms", bench.repeats, sample, detail, bytes=size, **more)


def prefill(bench: Bench, length: int) -> Entry:
    """Measures one call of `length` tokens of both copies, with the cache's allocation and the last logits."""
    work = bench.work(length)

    def sample(arm: Arm) -> tuple[float, str]:
        with (watch := bench.watch()):
            cache, logits = prefilled(arm, work, length)
        return watch.seconds, digest(logits, *arm.tensors(cache))

    detail = {"length": length, "flops": costs.prefill_cost(bench.config, bench.numeric.dtype, length).flops}
    more = {"floor": work.call(length)[3], "tokens": length}
    return in_turn(bench, f"prefill, {length} tokens", "tokens/s", bench.repeats, sample, detail, **more)


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


def memory(bench: Bench, length: int) -> Entry:
    """Measures load time and peak memory of every arm over `length` tokens, in fresh processes, in turn."""
    found: dict[str, list[Entry]] = {arm.name: [] for arm in bench.arms}

    def sample(name: str) -> float:
        bench.note(f"fresh process: {name}")
        found[name].append(bench.fresh(name, partial(run_workload, length)))
        return found[name][-1]["seconds"]

    seconds = interleaved({name: partial(sample, name) for name in found}, bench.long_repeats, warm_up=0)
    columns = {
        name: {
            "samples": seconds[name],
            "speed": ratios(seconds[bench.baseline], seconds[name]),
            **{key: spread([one[key] for one in measured]) for key in ("seconds", "imports", "loaded", "peak")},
        }
        for name, measured in found.items()
    }
    table = bench.arms[0].model.role_embedding
    rows = 0 if table is None else table.shape[0]
    return {"weights": costs.weight_bytes(bench.config, bench.numeric.dtype, rows), "columns": columns}


def run_workload(length: int, arm: Arm, contract: Contract) -> None:
    """Runs `length` tokens: one call of all but the last `STEPS`, then these one by one."""
    work = Workload.of(contract, length, arm.model.numeric.torch_device)
    stepper = resumed(arm, prefilled(arm, work, length - STEPS, length)[0], work, length - STEPS, length)
    for token, role in work.steps(length - STEPS, length):
        arm.model.logits(stepper.feed(token, role))


def in_fresh_process(*arguments: Any) -> Entry:
    """Returns `peaks(*arguments)` of a new process. InputError where it fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(peaks, *arguments).result()
        except KeyboardInterrupt:  # SIGTERM reaches this process alone
            for child in multiprocessing.active_children():
                child.kill()
            raise
        except Exception as error:
            raise InputError(f"measuring in a child process failed: {one_line(error)}") from None


def peaks(directory: Path, numeric: NumericContract, reference: str | None, name: str, run: Run) -> Entry:
    """Loads the arm `name` and runs it. Returns the seconds of the load, the most bytes in use up to the end of the
    imports, of the load and of the run, and what the run returned."""
    numeric.apply()
    contract = Contract.load(directory)
    if name not in COLUMNS:
        importlib.import_module(str(reference))
    imports, start = peak_bytes(), time.perf_counter()
    if name in COLUMNS:
        [arm] = open_ours(directory, numeric, (name,), copies=1)  # the parent has checked equal copies
    else:
        arm = open_reference(str(reference), directory, numeric)
    seconds, loaded = time.perf_counter() - start, peak_bytes()
    with torch.inference_mode():
        found = run(arm, contract)
    return {"seconds": seconds, "imports": imports, "loaded": loaded, "peak": peak_bytes(), "found": found}


def peak_bytes() -> int:
    """Returns the most bytes of memory that this process has had in use.

    VmHWM starts at zero with the process image. getrusage's ru_maxrss, for systems without it, is inherited.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="ascii"))):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Row(Workload):
    """A task to decode: its prompt, the structure after it, and the tokens that it may hold."""

    structure: Structure
    most: int

    @classmethod
    def after(cls, prompt: State, limit: int | None, device: torch.device) -> "Row":
        """limit: tokens to generate at most; None: to the end of the answer."""
        longest = longest_row([prompt])
        most = longest if limit is None else min(longest, len(prompt) + limit)
        return cls(prompt.contract, prompt.tokens, prompt.roles, device, prompt.structure, most)

    def begin(self, arm: Arm, cache: Any) -> tuple[Stepper, Steps[Generated]]:
        """Returns a stepper over `cache`, which holds the prompt, and the greedy steps that it takes."""
        stepper = resumed(arm, cache, self, len(self), self.most)
        ends = lambda structure: structure.done or stepper.length >= self.most  # noqa: E731
        return stepper, generate(stepper, self.contract, self.structure, None, ends)


Decoded = tuple[tuple[int, ...], list[Tensor]]  # of one row: the tokens generated, and all K/V after them


def decoding(arm: Arm, row: Row) -> Steps[Decoded]:
    """Returns all steps of a row, its prompt taken in one call."""
    cache = arm.new_cache(row.most)
    arm.model(*row.call(len(row)), cache)
    made = yield from row.begin(arm, cache)[1]
    return made.tokens, arm.tensors(cache)


def together(arm: Arm, rows: Sequence[Row], size: int, joint: Decoder) -> list[Decoded]:
    """Decodes rows, `size` at a time: the next begins where one ends. joint: for `decode.batched.in_flight`."""
    clock = Progress(1, 0, quiet=True).row("")
    found = dict(in_flight((Job(number, decoding(arm, row), clock) for number, row in enumerate(rows)), size, joint))
    for result in found.values():
        if isinstance(result, RowFailure):
            raise result
    return [found[number] for number in range(len(rows))]


def padded(arm: Arm, rows: Sequence[Row], size: int) -> list[Decoded]:
    """Decodes rows in batches of `size` as transformers builds them: padded on the left to one length, one call per
    step, and a row that has ended repeats its last call until all have."""
    if len(rows) > size:
        return padded(arm, rows[:size], size) + padded(arm, rows[size:], size)
    pads = [max(map(len, rows)) - len(row) for row in rows]
    cache = arm.new_cache(max(pad + row.most for pad, row in zip(pads, rows)), COPIES * len(rows))
    calls: list[Call] = [row.call(len(row)) for row in rows]
    arm.model(*left_padded(calls), cache)
    # a range stands for a row's own cache, of which the stepper reads only the length
    steppers, flying = zip(*(row.begin(arm, range(len(row))) for row in rows))
    due: list[Step | None] = [next(steps) for steps in flying]
    tokens: dict[int, tuple[int, ...]] = {}
    while len(tokens) < len(rows):
        calls = [step.stepper.call(step.token, step.role) if step else call for step, call in zip(due, calls)]
        hidden = arm.model(*left_padded(calls), cache)
        logits = arm.model.logits(hidden)[:, 0]
        for number, step in enumerate(due):
            if step is not None:
                first = slice(COPIES * number, COPIES * number + 1)  # of two copies, whose bits may differ here
                choice = None if step.eligible is None else best_two(logits[first], step.eligible)
                try:
                    due[number] = flying[number].send((hidden[first], choice))
                except StopIteration as end:
                    tokens[number], due[number] = end.value.tokens, None
    found = []
    for number, (pad, stepper) in enumerate(zip(pads, steppers)):
        of = slice(COPIES * number, COPIES * (number + 1)), slice(None), slice(pad, pad + stepper.length)
        found.append((tokens[number], [tensor[of].contiguous() for tensor in arm.tensors(cache)]))
    return found


def left_padded(calls: Sequence[Call]) -> list[Tensor]:
    """Returns one call of all rows' calls. No token sees padding; padding sees every key, as a query that sees none
    can give NaN."""
    *ids, masks = ([part for part in parts if part is not None] for parts in zip(*calls))
    width, total = (max(mask.shape[axis] for mask in masks) for axis in (2, 3))
    wide = [F.pad(mask, (total - mask.shape[3], 0)) for mask in masks]
    high = [F.pad(mask, (0, 0, width - mask.shape[2], 0), value=True) for mask in wide]
    return [*(torch.cat([F.pad(part, (width - part.shape[1], 0)) for part in parts]) for parts in ids), torch.cat(high)]


Key = tuple[str, int]  # series, rows decoded together


def batch_runs(bench: Bench, rows: Sequence[Row]) -> tuple[dict[Key, Callable[[], list[Decoded]]], list[str]]:
    """Returns what decodes all rows, by series and size, and a sentence per column that cannot take every size."""
    sizes = [size for size in SIZES if size <= len(rows)]
    runs: dict[Key, Callable[[], list[Decoded]]] = {}
    omitted = []
    for arm in bench.arms:
        if arm.name in COLUMNS:
            found = together_here(arm.model, sizes[-1])
            fitting = [size for size in sizes if size <= found.size]
            runs |= {(arm.name, size): partial(together, arm, rows, size, found.model) for size in fitting}
            if found.size < sizes[-1]:
                omitted.append(f"column {arm.name}: at most {found.size} rows together, {found.limit}")
        else:
            runs[arm.name, 1] = partial(together, arm, rows, 1, arm.model)
            runs |= {(arm.name + PADDED, size): partial(padded, arm, rows, size) for size in sizes[1:]}
    return runs, omitted


def batch(bench: Bench, tasks: Sequence[TaskRow], limit: int | None) -> Entry:
    """Measures rows decoded together, from prompt to answer or for `limit` tokens each, against one row at a time.

    Returns `batch` of benchmark.json: `series` {NAME: {SIZE: {...}}}. A reference has a second series, its padded
    batch. Bits, text and `speed` are compared with the same arm at one row, `speed_over_baseline` with the baseline.
    """
    bench.note(f"batches of {len(tasks)} rows")
    before = load()
    runs, omitted = batch_runs(bench, [Row.after(prompt, limit, bench.numeric.torch_device) for _, prompt in tasks])
    made: dict[Key, list[tuple[tuple[int, ...], str]]] = {}  # of each row: its tokens, and the digest of its K/V

    def sample(key: Key) -> float:
        with (watch := bench.watch()):
            rows = runs[key]()
        made[key] = [(tokens, digest(*held)) for tokens, held in rows]
        return watch.seconds

    seconds = interleaved({key: partial(sample, key) for key in runs}, bench.long_repeats)
    series: dict[str, dict[str, Entry]] = {}
    for key in runs:
        name, own = key[0], (key[0].removesuffix(PADDED), 1)
        text, bits = (sum(mine[i] != alone[i] for mine, alone in zip(made[key], made[own])) for i in (0, 1))
        series.setdefault(name, {})[str(key[1])] = {
            "seconds": (whole := spread(seconds[key])),  # of all rows
            "samples": seconds[key],
            "rows_per_minute": 60 * len(tasks) / whole["median"],
            "tokens_per_second": sum(len(tokens) for tokens, _ in made[key]) / whole["median"],
            "speed": ratios(seconds[own], seconds[key]),
            "speed_over_baseline": ratios(seconds[bench.baseline, 1], seconds[key]),
            "bits": DIFFERS if bits else EQUAL,
            "rows_with_other_bits": bits,
            "rows_with_other_text": text,
        }
    for name, cells in series.items():
        bench.note(f"peak memory: {name}")
        run = partial(batch_peaks, [task for task, _ in tasks], limit, [*map(int, cells)], name.endswith(PADDED))
        for size, peak in bench.fresh(name.removesuffix(PADDED), run)["found"].items():
            cells[str(size)]["peak_bytes"] = peak
    broken = [["one row at a time", a, b] for a, b in bench.required if made[a, 1] != made[b, 1]]
    differing = [key for key in runs if key[0] in COLUMNS and made[key] != made[key[0], 1]]
    broken += [[f"{size} rows together", name, f"{name} one at a time"] for name, size in differing]
    more = {"load_average": [before, load()], "omitted": omitted, "unequal_bits": broken}
    return {"rows": len(tasks), "limit": limit, "series": series, **more}


def batch_peaks(
    tasks: Sequence[Task], limit: int | None, sizes: Sequence[int], pad: bool, arm: Arm, contract: Contract
) -> dict[int, int]:
    """Decodes the first SIZE rows together for each size, smallest first. Returns the peak memory after each."""
    prompts = [State.prompt(contract, task.question, task.choices) for task in tasks]
    rows, found = [Row.after(prompt, limit, arm.model.numeric.torch_device) for prompt in prompts], {}
    for size in sizes:
        if pad:
            padded(arm, rows[:size], size)
        else:
            together(arm, rows[:size], size, arm.model if size == 1 else together_here(arm.model, size).model)
        found[size] = peak_bytes()
    return found
