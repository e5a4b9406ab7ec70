"""What is measured beside the cells: the distance of a boundary to the same prefix in float64, and the queries of one
attention call whose output changes bits when the query runs alone.

The latter is where the constructions part: an incremental build gives the kernel each query alone, a prefill all of
them at once. `eager` is also taken apart: its two products and its softmax are compared one by one, each on the inputs
that it has in the whole call.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.build import build_prefill
from decode.greedy import best_two
from decode.state import State
from minimodel.attention import ATTENTION_KERNELS, repeat_heads
from minimodel.bits import at_least_fp32, same_bits
from minimodel.checkpoint import Checkpoint
from minimodel.config import ModelConfig
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.roles import MERGE, causal_mask

LENGTH, COPIES, SEED = 205, 2, 20260728  # a prefix of the demo is about so long
Operation = Callable[[int, int], Tensor]  # queries i to j-1 over keys 0 to j-1 -> [B, H, j - i, ...]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, float]  # query, keys, values, mask, scaling of an attention kernel


def fp64_oracle(checkpoint: Checkpoint, device: str, threads: int) -> Callable[[State], Boundary]:
    """Returns a function of a prefix: its FP64 boundary under the eager kernel, in one copy, as no bits are compared.

    The model is loaded at the first call, and boundaries are kept by prefix.
    """
    numeric = NumericContract("fp64", device, attention="eager", threads=threads)
    model = cache(partial(decoder_from, checkpoint, numeric))
    kept: dict[tuple[int, ...], Boundary] = {}

    def boundary(state: State) -> Boundary:
        if state.tokens not in kept:
            kept[state.tokens] = build_prefill(model(), state, copies=1)
        return kept[state.tokens]

    return boundary


def oracle_entry(built: dict[str, Boundary], oracle: Boundary) -> dict[str, Any]:
    """Returns the row's `oracle`: per arm the relative L2 of cache and logits to the oracle's and whether the argmax is
    equal; `nearer`, the arm whose cache is nearer, None at equal distance; `margin`, the oracle's at the boundary.
    """
    eligible = oracle.state.contract.eligible[MERGE].to(oracle.logits.device)
    token, top, second = best_two(oracle.logits, eligible)
    *oracle_cache, logits = oracle.tensors()
    arms = {}
    for name, boundary in built.items():
        *my_cache, my_logits = boundary.tensors()
        arms[name] = {
            "cache_relative_l2": _relative_l2(my_cache, oracle_cache),
            "logits_relative_l2": _relative_l2([my_logits], [logits]),
            "argmax_equal": best_two(boundary.logits, eligible)[0] == token,
        }
    nearest = min(entry["cache_relative_l2"] for entry in arms.values())
    names = [name for name, entry in arms.items() if entry["cache_relative_l2"] == nearest]
    return {"arms": arms, "nearer": names[0] if len(names) == 1 else None, "margin": top - second}


def _relative_l2(mine: list[Tensor], oracle: list[Tensor]) -> float:
    """Returns the L2 norm of the first copy's difference over the oracle's norm, both in float64."""
    delta = sum(float((a[:1].to(torch.float64) - b).square().sum()) for a, b in zip(mine, oracle, strict=True))
    norm = sum(float(b.square().sum()) for b in oracle)
    return math.sqrt(delta / norm) if norm else 0.0


def random_inputs(config: ModelConfig, numeric: NumericContract) -> Inputs:
    """Returns seeded random query [B, H, S, D], keys and values [B, H_kv, S, D] of a model's head shapes, and a causal
    mask."""
    generator = torch.Generator().manual_seed(SEED)

    def random(heads: int) -> Tensor:
        made = torch.randn((COPIES, heads, LENGTH, config.head_dim), generator=generator)
        return made.to(numeric.torch_dtype).to(numeric.torch_device)

    query, keys, values = map(random, (config.num_attention_heads, *[config.num_key_value_heads] * 2))
    return query, keys, values, causal_mask(LENGTH, LENGTH, numeric.torch_device), config.head_dim**-0.5


@torch.inference_mode()
def rows_alone(config: ModelConfig, numeric: NumericContract, kernels: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns {OPERATION: {rows, differing}}: queries (copies and heads together), and those whose bits change alone.

    The numeric contract is put in force; which kernels it names does not matter.
    """
    numeric.apply()
    inputs = random_inputs(config, numeric)
    operations = {kernel: kernel_operation(kernel, inputs) for kernel in kernels}
    if "eager" in kernels:
        operations |= parts_of_eager(inputs)
    found = {}
    for name, operation in operations.items():
        whole, differing = operation(0, LENGTH), 0
        for i in range(LENGTH):
            alone = operation(i, i + 1)[:, :, 0]
            differing += not same_bits(alone, whole[:, :, i, : alone.shape[-1]])
        found[name] = {"rows": LENGTH, "differing": differing}
    return found


def kernel_operation(name: str, inputs: Inputs) -> Operation:
    """Returns a whole attention kernel."""
    query, keys, values, mask, scaling = inputs
    return lambda i, j: ATTENTION_KERNELS[name](
        query[:, :, i:j], keys[:, :, :j], values[:, :, :j], mask[:, :, i:j, :j], scaling
    ).transpose(1, 2)


def parts_of_eager(inputs: Inputs) -> dict[str, Operation]:
    """Returns the three steps of `minimodel.attention.eager`. Scores and weights are compared at visible keys."""
    query, keys, values, mask, scaling = inputs
    groups = query.shape[1] // keys.shape[1]
    keys, values = repeat_heads(keys, groups), repeat_heads(values, groups)
    wide, lowest = at_least_fp32(query.dtype), torch.finfo(query.dtype).min

    def scores(i: int, j: int) -> Tensor:
        made = torch.matmul(query[:, :, i:j], keys[:, :, :j].transpose(2, 3)) * scaling
        return made.masked_fill(~mask[:, :, i:j, :j], lowest)

    given = scores(0, LENGTH)

    def softmax(i: int, j: int) -> Tensor:
        return torch.softmax(given[:, :, i:j, :j].contiguous(), dim=-1, dtype=wide).to(query.dtype)

    weights = softmax(0, LENGTH)

    def product(i: int, j: int) -> Tensor:
        return torch.matmul(weights[:, :, i:j, :j].contiguous(), values[:, :, :j])

    return {"eager, scores": scores, "eager, softmax": softmax, "eager, product with the values": product}
