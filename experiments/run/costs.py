"""Costs, counted and measured: bytes and floating-point operations from the config's shapes; samples of time taken in
turn, so that other load on the machine affects all of them; the read bandwidth.

Weights, K/V and the matrix products over them are counted exactly. Norms, rotations and activations are left out: they
are a thousandth of the operations and, at batch two, of the bytes.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch

from minimodel.bits import COPIES
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.numerics import DTYPES
from minimodel.roles import ROLE_ROWS

CACHES = 5  # of a matrix row: live, its replica, prefill, its replica, and the suffix decoder's working copy
CONTINUATIONS = 4  # arms of a matrix row
T = TypeVar("T")
Sample = Callable[[], float]  # prepares untimed, runs, and returns seconds per unit
Rounds = dict[str, list[float]]  # arm: one sample per round


@dataclass(frozen=True)
class Cost:
    """Bytes read and floating-point operations (a multiply-add counts two)."""

    bytes: float
    flops: float

    def seconds(self, bandwidth: float, tflops: float | None) -> float:
        """Returns the longer of reading at `bandwidth` GB/s and computing at `tflops` (None: reading alone)."""
        return max(self.bytes / (bandwidth * 1e9), 0.0 if tflops is None else self.flops / (tflops * 1e12))


def parameters(config: ModelConfig, role_rows: int = ROLE_ROWS) -> int:
    """Returns the elements in memory: every tensor, a tied head once, and the role table (0 rows: stock)."""
    shapes = expected_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return sum(math.prod(shape) for shape in shapes.values()) + role_rows * config.hidden_size


def weight_bytes(config: ModelConfig, dtype: str, role_rows: int = ROLE_ROWS) -> int:
    """Returns the bytes of the weights in `dtype`."""
    return parameters(config, role_rows) * DTYPES[dtype].itemsize


def cache_bytes(config: ModelConfig, dtype: str, tokens: int, copies: int = COPIES) -> int:
    """Returns the bytes of keys and values of `tokens` tokens, all layers and copies."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * tokens * copies * DTYPES[dtype].itemsize


def step_bytes(config: ModelConfig, dtype: str, context: int, logits: bool = True, copies: int = COPIES) -> int:
    """Returns the bytes that a decode step reads: all weights but the embedding table, and K/V of `context` tokens."""
    table = config.vocab_size * config.hidden_size  # elements of the embedding, and of the head
    layers = parameters(config, 0) - (1 if config.tie_word_embeddings else 2) * table
    weights = layers + (table if logits else 0)
    return weights * DTYPES[dtype].itemsize + cache_bytes(config, dtype, context, copies)


def token_flops(config: ModelConfig, context: float, logits: bool) -> float:
    """Returns the operations of one token of one copy that attends over `context` keys, masked ones included."""
    shapes = expected_shapes(config).items()
    matrices = sum(math.prod(shape) for name, shape in shapes if name.endswith("_proj.weight"))  # seven per layer
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return 2 * matrices + attention + (2 * config.vocab_size * config.hidden_size if logits else 0)


def steps_cost(config: ModelConfig, dtype: str, start: int, stop: int, logits: bool) -> Cost:
    """Returns the cost of feeding tokens one at a time until the cache has grown from `start` to `stop` tokens."""
    count, mean = stop - start, (start + 1 + stop) / 2  # a step at slot s reads s + 1 keys
    fixed = step_bytes(config, dtype, 0, logits)
    read = count * (fixed + cache_bytes(config, dtype, 1) * mean)
    return Cost(read, count * COPIES * token_flops(config, mean, logits))


def prefill_cost(config: ModelConfig, dtype: str, tokens: int) -> Cost:
    """Returns the cost of one call of `tokens` tokens with the last logits. Masked query-key products count too."""
    flops = COPIES * tokens * token_flops(config, tokens, False)
    flops += COPIES * 2 * config.vocab_size * config.hidden_size
    return Cost(step_bytes(config, dtype, tokens), flops)


def row_parts(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> list[Cost]:
    """Returns a matrix row's parts: live, token by token, each with logits; two prefills; four continuations."""
    live = steps_cost(config, dtype, 0, prefix, logits=True)
    continuation = steps_cost(config, dtype, prefix, prefix + suffix, logits=True)
    return [live, *[prefill_cost(config, dtype, prefix)] * 2, *[continuation] * CONTINUATIONS]


def row_cost(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> Cost:
    """Returns the cost of a matrix row: the sum of `row_parts`."""
    parts = row_parts(config, dtype, prefix, suffix)
    return Cost(sum(part.bytes for part in parts), sum(part.flops for part in parts))


def row_cache_bytes(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> int:
    """Returns the most K/V bytes that a matrix row holds: four boundary caches and the growing working copy."""
    return (CACHES - 1) * cache_bytes(config, dtype, prefix) + cache_bytes(config, dtype, prefix + suffix)


class Spread(TypedDict):
    """Median and quartiles of samples or of ratios."""

    median: float
    quartiles: list[float]
    n: int


def spread(samples: Sequence[float]) -> Spread:
    """Returns the spread of samples, with inclusive quartiles. One sample is its own median and quartiles."""
    if len(samples) == 1:
        return {"median": samples[0], "quartiles": [samples[0]] * 2, "n": 1}
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": statistics.median(samples), "quartiles": [low, high], "n": len(samples)}


def interleaved(samples: Mapping[T, Sample], repeats: int, warm_up: int = 1) -> dict[T, list[float]]:
    """Returns the samples of `repeats` rounds after `warm_up` dropped ones. Each round begins with another arm."""
    names = list(samples)
    found: dict[T, list[float]] = {name: [] for name in names}
    for number in range(warm_up + repeats):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            seconds = samples[name]()
            if number >= warm_up:
                found[name].append(seconds)
    return found


def ratios(base: Sequence[float], other: Sequence[float]) -> Spread:
    """Returns base / other, round by round: how many times as fast the other is."""
    return spread([left / right for left, right in zip(base, other, strict=True)])


class Stopwatch:
    """`with watch: ...` adds the elapsed seconds. It waits for the device's pending work at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> "Stopwatch":
        self.seconds -= self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


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
