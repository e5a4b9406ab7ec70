"""Counts queries whose attention output changes bits when the query runs alone, per kernel and without a model.

This is where the constructions part: an incremental build gives the kernel each query alone, a prefill all of them at
once. `eager` is also taken apart: its two products and its softmax are compared one by one, each on the inputs that it
has in the whole call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, repeat_heads
from minimodel.bits import at_least_fp32, same_bits
from minimodel.config import ModelConfig
from minimodel.numerics import NumericContract
from minimodel.roles import causal_mask

LENGTH, COPIES, SEED = 205, 2, 20260728  # a prefix of the demo is about so long
Operation = Callable[[int, int], Tensor]  # queries i to j-1 over keys 0 to j-1 -> [B, H, j - i, ...]


@dataclass(frozen=True)
class Inputs:
    """Seeded random query [B, H, S, D], keys and values [B, H_kv, S, D] of a model's head shapes, and a causal mask."""

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    scaling: float

    @classmethod
    def of(cls, config: ModelConfig, numeric: NumericContract) -> "Inputs":
        generator = torch.Generator().manual_seed(SEED)

        def random(heads: int) -> Tensor:
            made = torch.randn((COPIES, heads, LENGTH, config.head_dim), generator=generator)
            return made.to(numeric.torch_dtype).to(numeric.torch_device)

        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        mask = causal_mask(LENGTH, LENGTH, numeric.torch_device)
        return cls(random(heads), random(kv_heads), random(kv_heads), mask, config.head_dim**-0.5)


@torch.inference_mode()
def rows_alone(config: ModelConfig, numeric: NumericContract, kernels: Sequence[str]) -> dict[str, Any]:
    """Returns {OPERATION: {rows, differing}}: queries (copies and heads together), and those whose bits change alone.

    The numeric contract is put in force; which kernels it names does not matter.
    """
    numeric.apply()
    inputs = Inputs.of(config, numeric)
    operations = {kernel: _kernel(kernel, inputs) for kernel in kernels}
    if "eager" in kernels:
        operations |= parts_of_eager(inputs)
    return {name: _compared(operation) for name, operation in operations.items()}


def _compared(operation: Operation) -> dict[str, int]:
    whole = operation(0, LENGTH)
    differing = 0
    for i in range(LENGTH):
        alone = operation(i, i + 1)[:, :, 0]
        differing += not same_bits(alone, whole[:, :, i, : alone.shape[-1]])
    return {"rows": LENGTH, "differing": differing}


def _kernel(name: str, x: Inputs) -> Operation:
    attend = ATTENTION_KERNELS[name]
    return lambda i, j: attend(
        x.query[:, :, i:j], x.keys[:, :, :j], x.values[:, :, :j], x.mask[:, :, i:j, :j], x.scaling
    ).transpose(1, 2)


def parts_of_eager(x: Inputs) -> dict[str, Operation]:
    """Returns the three steps of `minimodel.attention.eager`. Scores and weights are compared at visible keys."""
    groups = x.query.shape[1] // x.keys.shape[1]
    keys, values = repeat_heads(x.keys, groups), repeat_heads(x.values, groups)
    wide = at_least_fp32(x.query.dtype)
    lowest = torch.finfo(x.query.dtype).min

    def scores(i: int, j: int) -> Tensor:
        made = torch.matmul(x.query[:, :, i:j], keys[:, :, :j].transpose(2, 3)) * x.scaling
        return made.masked_fill(~x.mask[:, :, i:j, :j], lowest)

    given = scores(0, LENGTH)

    def softmax(i: int, j: int) -> Tensor:
        return torch.softmax(given[:, :, i:j, :j].contiguous(), dim=-1, dtype=wide).to(x.query.dtype)

    weights = softmax(0, LENGTH)

    def product(i: int, j: int) -> Tensor:
        return torch.matmul(weights[:, :, i:j, :j].contiguous(), values[:, :, :j])

    return {"eager, scores": scores, "eager, softmax": softmax, "eager, product with the values": product}
