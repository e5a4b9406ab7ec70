"""Attention kernels by name, all of one signature. The first, `eager`, is the specification.

attend(query [B, H, T, D], keys and values [B, H_kv, S, D], mask, scaling) -> [B, T, H, D] in the dtype of query.
`mask` is bool [B, 1, T, S], True where the query may attend to the key, or None for plain causal attention, the T
queries being the last T of the S positions. A query that may attend to nothing gives zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import at_least_fp32
from minimodel.invariant.attention import blocked, blocked_several
from minimodel.roles import causal_mask, zero_dead_rows

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
Softmax = Callable[[Tensor], Tensor]
# query [K*B, H, T, D], keys and values of each of K requests, mask of each, scaling -> [K*B, T, H, D]
SeveralAttention = Callable[[Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[Tensor | None], float], Tensor]


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """transformers' `repeat_kv`: [B, H_kv, S, D] -> [B, H_kv * groups, S, D]; query head h reads head h // groups."""
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, head_dim).reshape(batch, heads * groups, length, head_dim)


def softmax_fp32(weights: Tensor) -> Tensor:
    """Softmax over the last axis, in FP32 (its sum runs over S terms), rounded once: the values see the model dtype."""
    return F.softmax(weights, dim=-1, dtype=at_least_fp32(weights.dtype)).to(weights.dtype)


def softmax_model_dtype(weights: Tensor) -> Tensor:
    """Softmax over the last axis; difference, exponential, sum and quotient each round to the model dtype."""
    weights = (weights - weights.amax(dim=-1, keepdim=True)).exp()  # [B, H, T, S]
    return weights / weights.sum(dim=-1, keepdim=True)  # [B, H, T, S]


def eager(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softmax: Softmax = softmax_fp32
) -> Tensor:
    """Two matrix products and an FP32 softmax: transformers `eager_attention_forward` (models/qwen2, 4.46 to 5.24)."""
    groups = query.shape[1] // keys.shape[1]  # H // H_kv
    keys, values = repeat_heads(keys, groups), repeat_heads(values, groups)  # [B, H, S, D]
    if mask is None:
        mask = causal_mask(query.shape[2], keys.shape[2], query.device)  # [1, 1, T, S]
    weights = torch.matmul(query, keys.transpose(2, 3)) * scaling  # [B, H, T, S]
    # the lowest finite value, as transformers adds it, and not -inf: a row of -inf would make softmax 0/0
    weights = softmax(weights.masked_fill(~mask, torch.finfo(weights.dtype).min))  # [B, H, T, S]
    out = zero_dead_rows(torch.matmul(weights, values), mask)  # [B, H, T, D]
    return out.transpose(1, 2)  # [B, T, H, D]


def sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """torch's scaled_dot_product_attention: query [B, H, T, D], keys and values of H or H_kv heads -> [B, T, H, D]."""
    length, key_length = query.shape[2], keys.shape[2]  # T, S
    if mask is None and length > 1 and length != key_length:
        # `is_causal` would take the queries for the first T positions; they are the last T of S
        mask = causal_mask(length, key_length, query.device)  # [1, 1, T, S]
    causal, grouped = mask is None and length > 1, query.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, is_causal=causal, enable_gqa=grouped
    )  # [B, H, T, D]
    return (out if mask is None else zero_dead_rows(out, mask)).transpose(1, 2)  # [B, T, H, D]


def repeat_kv_literal(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """SDPA with every key/value head repeated in memory for its query heads: transformers up to 5.22.

    Source: integrations/sdpa_attention.py. Without a mask those releases pass `is_causal`, and so does this.
    """
    groups = query.shape[1] // keys.shape[1]
    return sdpa(query, repeat_heads(keys, groups), repeat_heads(values, groups), mask, scaling)


def repeat_kv(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Returns `repeat_kv_literal`'s bits. On the CPU SDPA groups the heads itself, to the same bits without a copy.

    Training keeps the literal form, whose gradient sums the repeated heads in another order.
    """
    fast = query.device.type == "cpu" and not query.requires_grad
    return (sdpa if fast else repeat_kv_literal)(query, keys, values, mask, scaling)


def packed_gqa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """SDPA as transformers calls it from 5.23 on.

    A single masked query packs its heads as rows onto the key/value heads. Several masked queries repeat the heads as
    before. Without a mask SDPA groups the heads.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = keys.shape[1]
    if kv_heads == heads or (mask is not None and length > 1):
        return repeat_kv(query, keys, values, mask, scaling)
    if mask is None:
        return sdpa(query, keys, values, None, scaling)
    packed = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)  # [B, H_kv, H // H_kv, D]
    out = sdpa(packed, keys, values, mask, scaling)  # [B, H // H_kv, H_kv, D]
    return out.transpose(1, 2).reshape(batch, 1, heads, head_dim)  # [B, 1, H, D]


def sdpa_fp32(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """`repeat_kv` with all of attention in FP32, rounded once at its end: isolates attention's own roundings.

    Queries, keys and values arrive rounded to the model dtype, in which K/V is stored. FP64 stays FP64.
    """
    wide = at_least_fp32(query.dtype)  # scores, softmax and both products see it
    out = repeat_kv(query.to(wide), keys.to(wide), values.to(wide), mask, scaling)  # [B, T, H, D]
    return out.to(query.dtype)  # the output projection sees the model dtype


ATTENTION_KERNELS: dict[str, Attention] = {
    "eager": eager,
    "repeat_kv": repeat_kv,
    "packed_gqa": packed_gqa,
    "blocked": blocked,
    "sdpa_fp32": sdpa_fp32,
    "eager_softmax_model_dtype": partial(eager, softmax=softmax_model_dtype),  # isolates what the FP32 softmax buys
}
# kernels that also take several requests in one call, to the same bits
SEVERAL_KERNELS: dict[str, SeveralAttention] = {"blocked": blocked_several}
