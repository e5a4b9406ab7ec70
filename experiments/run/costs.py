"""Bytes and floating-point operations of weights, cache, steps and matrix rows, counted from the config's shapes.

Weights, K/V and the matrix products over them are counted exactly. Norms, rotations and activations are left out: they
are a thousandth of the operations and, at batch two, of the bytes.
"""

import math
from dataclasses import dataclass

from minimodel.bits import COPIES
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.numerics import DTYPES
from minimodel.roles import ROLE_ROWS

CACHES = 5  # of a matrix row: live, its replica, prefill, its replica, and the suffix decoder's working copy
CONTINUATIONS = 4  # arms of a matrix row


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


def matrix_weights(config: ModelConfig) -> int:
    """Returns the elements of the seven matrices of all layers; each token is multiplied by each element once."""
    shapes = expected_shapes(config).items()
    return sum(math.prod(shape) for name, shape in shapes if name.endswith("_proj.weight"))


def token_flops(config: ModelConfig, context: float, logits: bool) -> float:
    """Returns the operations of one token of one copy that attends over `context` keys, masked ones included."""
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    head = 2 * config.vocab_size * config.hidden_size if logits else 0
    return 2 * matrix_weights(config) + attention + head


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


def row_cost(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> Cost:
    """Returns the cost of a matrix row: the sum of `row_parts`."""
    parts = row_parts(config, dtype, prefix, suffix)
    return Cost(sum(part.bytes for part in parts), sum(part.flops for part in parts))


def row_parts(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> list[Cost]:
    """Returns a matrix row's parts: live, token by token, each with logits; two prefills; four continuations."""
    live = steps_cost(config, dtype, 0, prefix, logits=True)
    continuation = steps_cost(config, dtype, prefix, prefix + suffix, logits=True)
    return [live, *[prefill_cost(config, dtype, prefix)] * 2, *[continuation] * CONTINUATIONS]


def row_cache_bytes(config: ModelConfig, dtype: str, prefix: int, suffix: int) -> int:
    """Returns the most K/V bytes that a matrix row holds: four boundary caches and the growing working copy."""
    held = (CACHES - 1) * cache_bytes(config, dtype, prefix)
    return held + cache_bytes(config, dtype, prefix + suffix)
