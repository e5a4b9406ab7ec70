"""Decode steps of several requests together, by their number: ours, with the bits that each request has alone, and a
padded batch of the reference, whose bits may differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.batched import take_together
from decode.greedy import Step, Stepped, best_two, take
from decode.independence import together_here
from decode.stepper import Stepper
from experiments.benchmark.arms import COLUMNS, Arm, Workload
from experiments.benchmark.measures import Bench, prefilled, tensors_digest
from experiments.benchmark.results import DIFFERS, EQUAL
from experiments.run.costs import Sample, Spread, cache_bytes, interleaved, ratios
from minimodel.bits import COPIES, RowFailure
from minimodel.decoder import Decoder
from minimodel.roles import attention_mask, position_ids

SIZES = (1, 2, 4, 8, 16)
SHORTER = 3  # tokens by which each request is shorter than the one before


@dataclass(frozen=True)
class Requests:
    """The same requests for every arm: prefixes of one workload, each a little shorter than the one before."""

    work: Workload
    starts: tuple[int, ...]  # tokens held before the first timed step
    steps: int
    eligible: Tensor  # bool [V]

    @classmethod
    def of(cls, bench: Bench, context: int) -> "Requests":
        """Returns as many requests as the largest size. The longest ends at `context` tokens."""
        steps = max(2, bench.steps // 4)
        starts = tuple(max(8, context - steps - SHORTER * number) for number in range(SIZES[-1]))
        return cls(bench.work(context), starts, steps, bench.contract.ordinary.to(bench.numeric.torch_device))

    def due(self, number: int, step: int) -> tuple[int, int]:
        """Returns token and role of a request's step."""
        slot = self.starts[number] + step
        return self.work.tokens[slot], self.work.roles[slot]


def held(arm: Arm, requests: Requests) -> list[Any]:
    """Returns every request's cache before its first step, made in one call each."""
    return [prefilled(arm, requests.work, start)[0] for start in requests.starts]


def steppers(arm: Arm, caches: Sequence[Any], requests: Requests, size: int) -> list[Stepper]:
    """Returns steppers over working copies of the first `size` requests."""
    made = []
    for start, cache in zip(requests.starts[:size], caches):
        capacity = start + requests.steps
        stepper = Stepper(arm.model, arm.copy_cache(cache, capacity), COPIES, capacity)
        stepper.resume(requests.work.roles[:start], requests.work.record(start))
        made.append(stepper)
    return made


def run(requests: Requests, flying: Sequence[Stepper], together: Decoder | None) -> list[Stepped | RowFailure]:
    """Runs all steps, joined by `together` (None: one request at a time), and returns the last steps' results."""
    found: list[Stepped | RowFailure] = []
    for step in range(requests.steps):
        due = [Step(s, *requests.due(n, step), requests.eligible) for n, s in enumerate(flying)]
        found = [take(each) for each in due] if together is None else take_together(due, together)
    return found


def digests(arm: Arm, flying: Sequence[Stepper], last: Sequence[Stepped | RowFailure]) -> list[str]:
    """Returns one digest per request, of its last choice and all its K/V."""
    return [_digest(stepped, arm.tensors(stepper.cache)) for stepper, stepped in zip(flying, last)]


def _digest(stepped: Stepped | RowFailure, tensors: Sequence[Tensor]) -> str:
    assert not isinstance(stepped, RowFailure), "copies differ in a benchmark"
    return tensors_digest(tensors, repr(stepped[1]).encode())


class Padded:
    """One batch of all requests as transformers builds it: padded on the left to one length, masked, one call."""

    def __init__(self, arm: Arm, requests: Requests, size: int) -> None:
        work, starts, device = requests.work, requests.starts[:size], requests.work.device
        self.arm, self.requests, self.size, longest = arm, requests, size, starts[0]
        self._pads = [longest - start for start in starts]
        rows = [row for number in range(size) for row in [number] * COPIES]
        total = longest + requests.steps
        tokens, roles = ([[0] * self._pads[n] + list(part[: total - self._pads[n]]) for n in rows]
                         for part in (work.tokens, work.roles))  # fmt: skip
        self._tokens, self._roles = torch.tensor(tokens, device=device), torch.tensor(roles, device=device)
        valid = (
            torch.arange(total, device=device)[None]
            >= torch.tensor([self._pads[n] for n in rows], device=device)[:, None]
        )
        self._positions = position_ids(valid)
        self._mask = attention_mask(self._roles, self._roles, valid, valid, work.contract.rules.visibility)
        self._longest = longest
        self.cache = arm.new_cache(total, len(rows))
        self._call(slice(0, longest))

    def _call(self, part: slice) -> Tensor:
        mask = self._mask[:, :, part, : part.stop]
        return self.arm.model(self._tokens[:, part], self._roles[:, part], self._positions[:, part], mask, self.cache)

    def run(self) -> list[Stepped | RowFailure]:
        """Runs all steps. Returns the last step's result per request."""
        found: list[Stepped | RowFailure] = []
        for step in range(self._longest, self._longest + self.requests.steps):
            hidden = self._call(slice(step, step + 1))
            logits = self.arm.model.logits(hidden)[:, 0].split(COPIES)
            found = [
                (after, best_two(each, self.requests.eligible)) for after, each in zip(hidden.split(COPIES), logits)
            ]
        return found

    def digests(self, last: Sequence[Stepped | RowFailure]) -> list[str]:
        """Returns one digest per request as `digests` does, without its padding."""
        tensors, found = self.arm.tensors(self.cache), []
        for number, (pad, stepped) in enumerate(zip(self._pads, last)):
            rows = slice(COPIES * number, COPIES * (number + 1))
            found.append(_digest(stepped, [tensor[rows, :, pad:].contiguous() for tensor in tensors]))
        return found


@torch.inference_mode()
def batch_entry(bench: Bench, context: int) -> dict[str, Any]:
    """Returns `batch` of benchmark.json: `series` {NAME: {SIZE: {seconds per token, samples, speed, bits}}}.

    speed and bits are compared with the same arm at one request at a time. A reference has a second series, its padded
    batch. omitted: sizes that our arms cannot take, and why.
    """
    bench.note(f"batches, context {context}")
    requests = Requests.of(bench, context)
    samples: dict[str, Sample] = {}
    bits: dict[str, str] = {}
    omitted: list[str] = []
    for arm in bench.arms:
        caches = held(arm, requests)
        flying = steppers(arm, caches, requests, SIZES[-1])
        alone = digests(arm, flying, run(requests, flying, None))
        samples[_key(arm.name, 1)] = partial(_together, bench, arm, caches, requests, 1, None, alone, bits)
        if arm.name not in COLUMNS:
            for size in SIZES[1:]:
                samples[_key(padded_name(arm), size)] = partial(_padded, bench, arm, requests, size, alone, bits)
            continue
        found = together_here(arm.model, SIZES[-1])
        for size in (size for size in SIZES[1:] if size <= found.size):
            one = partial(_together, bench, arm, caches, requests, size, found.model, alone, bits)
            samples[_key(arm.name, size)] = one
        if found.size < SIZES[-1]:
            omitted.append(f"column {arm.name}: at most {found.size} requests together, {found.limit}")
    seconds = interleaved(samples, bench.long_repeats)
    return {
        "context": context,
        "sizes": list(SIZES),
        "series": _series(bench, seconds, bits),
        "cache_bytes": {str(size): size * cache_bytes(bench.config, bench.numeric.dtype, context) for size in SIZES},
        "omitted": omitted,
    }


def padded_name(arm: Arm) -> str:
    return f"{arm.name}, padded batch"


def broken_batches(entry: dict[str, Any]) -> list[list[str]]:
    """Returns [what, column, what it promised] per batch of ours whose requests have other bits than alone."""
    return [
        [f"{size} requests together", name, f"{name} one at a time"]
        for name, cells in entry["series"].items()
        for size, cell in cells.items()
        if name in COLUMNS and cell["bits"] == DIFFERS
    ]


def _key(name: str, size: int) -> str:
    return f"{name}\n{size}"


def _together(
    bench: Bench,
    arm: Arm,
    caches: Sequence[Any],
    requests: Requests,
    size: int,
    together: Decoder | None,
    alone: list[str],
    bits: dict[str, str],
) -> float:
    """Returns seconds per token of one request, `size` at a time."""
    flying, watch = steppers(arm, caches, requests, size), bench.watch()
    with watch:
        last = run(requests, flying, together)
    bits[_key(arm.name, size)] = EQUAL if digests(arm, flying, last) == alone[:size] else DIFFERS
    return watch.seconds / (requests.steps * size)


def _padded(bench: Bench, arm: Arm, requests: Requests, size: int, alone: list[str], bits: dict[str, str]) -> float:
    """Returns the same of one padded batch."""
    batch, watch = Padded(arm, requests, size), bench.watch()
    with watch:
        last = batch.run()
    bits[_key(padded_name(arm), size)] = EQUAL if batch.digests(last) == alone[:size] else DIFFERS
    return watch.seconds / (requests.steps * size)


def _series(bench: Bench, seconds: dict[str, list[float]], bits: dict[str, str]) -> dict[str, dict[str, Any]]:
    own = {padded_name(arm): arm.name for arm in bench.arms}
    series: dict[str, dict[str, Any]] = {}
    for key, found in seconds.items():
        name, size = key.split("\n")
        series.setdefault(name, {})[size] = {
            "seconds": Spread.of(found).as_dict(),
            "samples": found,
            "speed": ratios(seconds[_key(own.get(name, name), 1)], found).as_dict(),
            "bits": bits[key],
        }
    return series
