"""Attention kernels by name, all of one signature. The first, `eager`, is the specification.

attend(query [B, H, T, D], keys and values [B, H_kv, S, D], mask, scaling) -> [B, T, H, D] in the dtype of query.
`mask` is bool [B, 1, T, S], True where the query row may attend to the key column, or None for plain causal attention
of T rows over T columns (or of one row over all). A query row that may attend to nothing gives zeros.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.errors import refuse

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[B, H_kv, S, D] -> [B, H_kv * groups, S, D]: query head h reads key/value head h // groups."""
    if groups == 1:
        return x
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, head_dim).reshape(batch, heads * groups, length, head_dim)


def eager(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Two matrix products and an FP32 softmax: transformers `eager_attention_forward` (models/qwen2, 4.46 to 5.24)."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = repeat_heads(keys, groups), repeat_heads(values, groups)
    if mask is None:
        mask = causal_mask(query.shape[2], keys.shape[2], query.device)
    weights = torch.matmul(query, keys.transpose(2, 3)) * scaling
    # the lowest finite value, as transformers adds it, and not -inf: a row of -inf would make softmax 0/0
    weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    # softmax sees FP32 (its sum runs over S terms); the product with the values sees the model dtype again
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    weights = F.softmax(weights, dim=-1, dtype=wide).to(query.dtype)
    out = torch.matmul(weights, values)
    return zero_dead_rows(out, mask).transpose(1, 2)


def repeat_kv(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """SDPA with every key/value head repeated for its query heads: transformers up to 5.22.

    Source: integrations/sdpa_attention.py. Without a mask those releases pass `is_causal`; so does this. On the CPU,
    SDPA groups the heads itself to the same bits (a test holds it to `repeat_kv_literal`) and copies nothing; training
    keeps the literal form, whose gradient sums the repeated heads in another order.
    """
    if query.device.type != "cpu" or query.requires_grad:
        return repeat_kv_literal(query, keys, values, mask, scaling)
    return _sdpa(query, keys, values, mask, scaling)


def repeat_kv_literal(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The specification of `repeat_kv`: the heads repeated in memory, as transformers does it."""
    groups = query.shape[1] // keys.shape[1]
    return _sdpa(query, repeat_heads(keys, groups), repeat_heads(values, groups), mask, scaling)


def packed_gqa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """transformers from 5.23 on: a single masked query packs its heads as rows onto the key/value heads, so that
    [B, H, 1, D] becomes [B, H_kv, H // H_kv, D]; more queries repeat as before; no mask lets SDPA group the heads.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = keys.shape[1]
    if mask is None and kv_heads != heads:
        return _sdpa(query, keys, values, None, scaling)
    if length > 1 or mask is None or kv_heads == heads:
        return repeat_kv(query, keys, values, mask, scaling)
    packed = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    return _sdpa(packed, keys, values, mask, scaling).transpose(1, 2).reshape(batch, 1, heads, head_dim)


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None and query.shape[2] > 1,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return (out if mask is None else zero_dead_rows(out, mask)).transpose(1, 2)


def zero_dead_rows(out: Tensor, mask: Tensor) -> Tensor:
    """out [B, H, T, D] with zeros in the rows that may attend to nothing, whatever the kernel left there (NaN, say).

    Only padding leaves such rows; live rows keep their bits. A row that may attend to itself is alive: that is looked
    at first, as it needs one entry a row and not all of them.
    """
    length, key_length = mask.shape[-2:]
    if bool(mask.diagonal(offset=key_length - length, dim1=-2, dim2=-1).all()):
        return out
    alive = mask.any(dim=-1, keepdim=True)
    return torch.where(alive, out, torch.zeros((), dtype=out.dtype, device=out.device))


def causal_mask(length: int, key_length: int, device: torch.device) -> Tensor:
    """bool [1, 1, T, S]: the T queries are the last T of the S positions."""
    rows = torch.arange(key_length - length, key_length, device=device)
    return (torch.arange(key_length, device=device)[None, :] <= rows[:, None])[None, None]


def check_mask(mask: Tensor | None, batch: int, length: int, key_length: int) -> None:
    """InputError unless the mask is bool [B or 1, 1, T, S]: 0/1 numbers could mean 'add' as well as 'may attend'."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise refuse("attention mask dtype", "torch.bool, True where a query may attend", mask.dtype)
    if tuple(mask.shape) not in ((batch, 1, length, key_length), (1, 1, length, key_length)):
        raise refuse("attention mask shape", f"[{batch}, 1, {length}, {key_length}]", list(mask.shape))


ATTENTION_KERNELS: dict[str, Attention] = {"eager": eager, "repeat_kv": repeat_kv, "packed_gqa": packed_gqa}
