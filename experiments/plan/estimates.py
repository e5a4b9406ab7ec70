"""Bytes and floating-point operations of weights, cache, steps and matrix rows, counted from the config's shapes.

Counted are the weights, K/V and the matrix products over them; norms, rotations and activations are left out: they
take a thousandth of the operations and, at batch two, of the bytes. What is counted is counted exactly.
"""

import math
from dataclasses import dataclass

from minimodel.bits import COPIES
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.numerics import DTYPES
from minimodel.roles import NUM_ROLES, ROLE_OFFSET

ROLE_ROWS = ROLE_OFFSET + NUM_ROLES
CACHES = 5  # of a matrix row: live, its replica, prefill, its replica, and the suffix decoder's working copy
CONTINUATIONS = 4  # arms of a matrix row


@dataclass(frozen=True)
class Cost:
    """Bytes read and floating-point operations (a multiply-add counts two)."""

    bytes: float
    flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, bandwidth: float, tflops: float | None) -> float:
        """The longer of reading at `bandwidth` GB/s and computing at `tflops`; None: reading alone."""
        return max(self.bytes / (bandwidth * 1e9), 0.0 if tflops is None else self.flops / (tflops * 1e12))


def parameters(config: ModelConfig, role_rows: int = ROLE_ROWS) -> int:
    """Elements in memory: every tensor of the checkpoint, a tied head not twice, and the role table (0 rows: stock)."""
    shapes = expected_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return sum(math.prod(shape) for shape in shapes.values()) + role_rows * config.hidden_size


def weight_bytes(config: ModelConfig, dtype: str, role_rows: int = ROLE_ROWS) -> int:
    """Bytes of the weights in `dtype`."""
    return parameters(config, role_rows) * DTYPES[dtype].itemsize


def cache_bytes(config: ModelConfig, dtype: str, tokens: int, copies: int = COPIES) -> int:
    """Bytes of keys and values of `tokens` tokens in every layer and copy."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * tokens * copies * DTYPES[dtype].itemsize


def step_bytes(config: ModelConfig, dtype: str, context: int, logits: bool = True, copies: int = COPIES) -> int:
    """Bytes that one decode step reads: all weights but the embedding's other rows, and K/V of `context` tokens."""
    table = config.vocab_size * config.hidden_size  # elements of the embedding, and of the head
    layers = parameters(config, 0) - (1 if config.tie_word_embeddings else 2) * table
    weights = layers + (table if logits else 0)
    return weights * DTYPES[dtype].itemsize + cache_bytes(config, dtype, context, copies)


def matrix_weights(config: ModelConfig) -> int:
    """Elements of the seven matrices of every layer: each token meets each of them once."""
    shapes = expected_shapes(config).items()
    return sum(math.prod(shape) for name, shape in shapes if name.endswith("_proj.weight"))


def token_flops(config: ModelConfig, context: float, logits: bool) -> float:
    """One token of one copy that attends over `context` keys (the masked ones are computed, too)."""
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    head = 2 * config.vocab_size * config.hidden_size if logits else 0
    return 2 * matrix_weights(config) + attention + head


def steps_cost(config: ModelConfig, dtype: str, start: int, stop: int, logits: bool) -> Cost:
    """Feeding tokens one at a time, so that the cache grows from `start` to `stop` tokens."""
    count, mean = stop - start, (start + 1 + stop) / 2  # a step at slot s reads s + 1 keys
    fixed = step_bytes(config, dtype, 0, logits)
    read = count * (fixed + cache_bytes(config, dtype, 1) * mean)
    return Cost(read, count * COPIES * token_flops(config, mean, logits))


def prefill_cost(config: ModelConfig, dtype: str, tokens: int) -> Cost:
    """One call of `tokens` tokens and the logits of the last; every query meets every key (a mask saves nothing)."""
    flops = COPIES * tokens * token_flops(config, tokens, False)
    flops += COPIES * 2 * config.vocab_size * config.hidden_size
    return Cost(step_bytes(config, dtype, tokens), flops)


def row_cost(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> Cost:
    """A matrix row: live, token by token (each with logits: most are chosen), two prefills, four continuations."""
    total = steps_cost(config, dtype, 0, prefix, logits=True)
    for _ in range(2):
        total += prefill_cost(config, dtype, prefix)
    for _ in range(CONTINUATIONS):
        total += steps_cost(config, dtype, prefix, prefix + suffix, logits=True)
    return total


def row_cache_bytes(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> int:
    """K/V held at a matrix row's fullest moment: four boundary caches and the working copy that grows."""
    held = (CACHES - 1) * cache_bytes(config, dtype, prefix)
    return held + cache_bytes(config, dtype, prefix + suffix)
