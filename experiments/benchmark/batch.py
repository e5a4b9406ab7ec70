"""Rows decoded together, by their number: ours, with the bits that each row has alone, and a padded batch of the
reference, whose bits may differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.batched import Job, in_flight
from decode.contract import Contract
from decode.greedy import Generated, Step, Steps, best_two, generate
from decode.independence import together_here
from decode.state import State, Structure
from decode.stepper import Call, Stepper
from experiments.benchmark.arms import COLUMNS, Arm, Workload
from experiments.benchmark.measures import DIFFERS, EQUAL, Bench, Entry, digest, resumed
from experiments.benchmark.memory import peak_bytes
from experiments.run.costs import interleaved, load, ratios, spread
from experiments.run.progress import Progress
from experiments.run.tasks import Task, longest_row
from minimodel.bits import COPIES, RowFailure
from minimodel.decoder import Decoder

SIZES = (1, 2, 4, 8, 16)  # rows decoded together
PADDED = ", padded batch"  # of the name of the reference's second series

TaskRow = tuple[Task, State]  # with the state after its prompt


@dataclass(frozen=True)
class Row(Workload):
    """A task to decode: its prompt, the structure after it, and the tokens that it may hold."""

    structure: Structure
    most: int

    @classmethod
    def after(cls, prompt: State, limit: int | None, device: torch.device) -> "Row":
        """Returns the row of a prompt. limit: tokens to generate at most; None: to the end of the answer."""
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
    """Decodes rows, `size` at a time: the next begins where one ends. joint: the decoder of common steps."""
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
Made = list[tuple[tuple[int, ...], str]]  # of each row: its tokens, and the digest of its K/V


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
    made: dict[Key, Made] = {}

    def sample(key: Key) -> float:
        with (watch := bench.watch()):
            rows = runs[key]()
        made[key] = [(tokens, digest(*held)) for tokens, held in rows]
        return watch.seconds

    seconds = interleaved({key: partial(sample, key) for key in runs}, bench.long_repeats)
    series: dict[str, dict[str, Entry]] = {}
    for name, size in runs:
        series.setdefault(name, {})[str(size)] = _cell(bench, (name, size), made, seconds)
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


def _cell(bench: Bench, key: Key, made: dict[Key, Made], seconds: dict[Key, list[float]]) -> Entry:
    """Returns one series at one size, beside the same arm at one row and beside the baseline."""
    own, whole = (key[0].removesuffix(PADDED), 1), spread(seconds[key])  # `whole`: of all rows
    text, bits = (sum(mine[i] != alone[i] for mine, alone in zip(made[key], made[own])) for i in (0, 1))
    return {
        "seconds": whole,
        "samples": seconds[key],
        "rows_per_minute": 60 * len(made[key]) / whole["median"],
        "tokens_per_second": sum(len(tokens) for tokens, _ in made[key]) / whole["median"],
        "speed": ratios(seconds[own], seconds[key]),
        "speed_over_baseline": ratios(seconds[bench.baseline, 1], seconds[key]),
        "bits": DIFFERS if bits else EQUAL,
        "rows_with_other_bits": bits,
        "rows_with_other_text": text,
    }


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
