"""Attention kernels: each against a float64 reference written out here, and against its own specification in bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, repeat_heads
from minimodel.bits import same_bits
from minimodel.roles import causal_mask
from tests.helpers import random_tensor

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-22, torch.float64: 2**-48}  # a few half units in the last place
KERNELS = sorted(ATTENTION_KERNELS)


def inputs(dtype: torch.dtype, queries: int, keys: int, heads: int = 6, kv_heads: int = 2) -> tuple[Tensor, ...]:
    """query, keys, values of two rows, head size 32, and a mask with holes that leaves every row something."""
    mask = random_tensor(2, 1, queries, keys, seed=3) > -0.5
    mask &= causal_mask(queries, keys, torch.device("cpu"))
    mask[..., 0] = True
    return (
        random_tensor(2, heads, queries, 32, dtype=dtype),
        random_tensor(2, kv_heads, keys, 32, dtype=dtype, seed=1),
        random_tensor(2, kv_heads, keys, 32, dtype=dtype, seed=2),
        mask,
    )


def reference(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Grouped-query attention, one output row at a time, in float64: [B, T, H, D]."""
    query, keys, values = query.double(), keys.double(), values.double()
    batch, heads, length, head_dim = query.shape
    out = torch.zeros(batch, length, heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            group = h * keys.shape[1] // heads
            for t in range(length):
                allowed = [s for s in range(keys.shape[2]) if mask[b % mask.shape[0], 0, t, s]]
                scores = [scaling * sum((query[b, h, t] * keys[b, group, s]).tolist()) for s in allowed]
                weights = [math.exp(score - max(scores)) for score in scores]
                for weight, s in zip(weights, allowed):
                    out[b, t, h] += weight / sum(weights) * values[b, group, s]
    return out


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 13), (13, 13), (5, 13)])
def test_kernel_against_the_float64_reference(name, dtype, queries, keys):
    query, key, value, mask = inputs(dtype, queries, keys)
    exact = reference(query, key, value, mask, 0.2)
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    assert out.dtype == dtype and out.shape == (2, queries, 6, 32)
    bound = 4 * ROUNDING[dtype] * float(value.double().abs().max())
    assert error(out, exact) <= bound
    if keys > 1:  # the controls: another scaling, a hole in the mask, heads in another order
        assert error(ATTENTION_KERNELS[name](query, key, value, mask, 0.4), exact) > bound
        holed = mask.clone()
        holed[..., 0] = False
        holed[..., 1] = True
        assert error(ATTENTION_KERNELS[name](query, key, value, holed, 0.2), exact) > bound
        assert error(ATTENTION_KERNELS[name](query, key.flip(1), value.flip(1), mask, 0.2), exact) > bound


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("queries", [1, 9])
def test_no_mask_means_causal(name, queries):
    query, key, value, _ = inputs(torch.float64, queries, 9)
    exact = reference(query, key, value, causal_mask(queries, 9, query.device), 0.2)
    assert error(ATTENTION_KERNELS[name](query, key, value, None, 0.2), exact) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("queries", [2, 5])
def test_no_mask_means_causal_from_the_last_key_where_there_are_more_keys(name, queries):
    """SDPA's is_causal counts rows from the first key; a decoder whose cache holds tokens means the last ones."""
    query, key, value, _ = inputs(torch.float64, queries, 9)
    out = ATTENTION_KERNELS[name](query, key, value, None, 0.2)
    exact = reference(query, key, value, causal_mask(queries, 9, query.device), 0.2)
    assert error(out, exact) < 1e-12
    top_left = reference(query, key, value, causal_mask(9, 9, query.device)[:, :, :queries], 0.2)
    assert error(out, top_left) > 1e-3, "the control: the other reading is another result"
    mask = causal_mask(queries, 9, query.device)
    assert same_bits(out, ATTENTION_KERNELS[name](query, key, value, mask, 0.2))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("queries", [1, 3])
def test_fourteen_query_heads_over_two(name, queries):
    """onnx/onnx 7274 (case 7): V of head 0 all 1, of head 1 all 2."""
    query, key, _, mask = inputs(torch.float32, queries, 5, heads=14)
    value = torch.ones(2, 2, 5, 32)
    value[:, 1] = 2
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    assert error(out[:, :, :7], torch.ones(2, queries, 7, 32)) < 1e-6
    assert error(out[:, :, 7:], torch.full((2, queries, 7, 32), 2.0)) < 1e-6


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dead_rows_are_zeros_and_nothing_they_see_matters(name, dtype):
    """pytorch/pytorch 103749 (case 4)."""
    query, key, value, mask = inputs(dtype, 4, 6)
    mask[0, 0, 1:3] = False
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    assert not out.isnan().any()
    assert torch.equal(out[0, 1:3], torch.zeros_like(out[0, 1:3]))
    assert out[0, 0].abs().sum() > 0 and out[1, 1].abs().sum() > 0
    other = query.clone()
    other[0, :, 1:3] = 50.0
    assert same_bits(ATTENTION_KERNELS[name](other, key, value, mask, 0.2), out)


@pytest.mark.parametrize("name", KERNELS)
def test_a_single_dead_query_is_zeros(name):
    query, key, value, mask = inputs(torch.bfloat16, 1, 6)
    mask[1] = False
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and out[0].abs().sum() > 0


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("queries", [1, 6])
def test_masked_keys_and_values_do_not_move_a_bit(name, queries):
    query, key, value, mask = inputs(torch.bfloat16, queries, 6)
    mask[..., 3] = False
    if queries > 1:
        mask[..., 3, 0] = True
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    hidden_key, hidden_value = key.clone(), value.clone()
    hidden_key[:, :, 3], hidden_value[:, :, 3] = 7.0, -9.0
    assert same_bits(ATTENTION_KERNELS[name](query, hidden_key, hidden_value, mask, 0.2), out)
    seen_value = value.clone()
    seen_value[:, :, 0] = -9.0
    assert not same_bits(ATTENTION_KERNELS[name](query, key, seen_value, mask, 0.2), out)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_into_a_longer_cache_give_the_bits_of_compact_tensors(name, dtype):
    query, key, value, mask = inputs(dtype, 1, 13)
    long_key, long_value = (torch.full((2, 2, 40, 32), float("nan"), dtype=dtype) for _ in range(2))
    long_key[:, :, :13], long_value[:, :, :13] = key, value
    out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
    assert same_bits(ATTENTION_KERNELS[name](query, long_key[:, :, :13], long_value[:, :, :13], mask, 0.2), out)
    assert not same_bits(ATTENTION_KERNELS[name](query, key.flip(2), value, mask, 0.2), out)


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_are_not_written(name):
    tensors = inputs(torch.bfloat16, 4, 6)
    before = [tensor.clone() for tensor in tensors]
    ATTENTION_KERNELS[name](*tensors, 0.2)
    assert all(same_bits(a, b) for a, b in zip(tensors, before))


def by_hand(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """SDPA with the heads repeated by torch's own repeat_interleave: what repeat_kv promises, bit for bit."""
    groups = query.shape[1] // keys.shape[1]
    repeated = [x.repeat_interleave(groups, dim=1) for x in (keys, values)]
    return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.2, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 13])
def test_repeat_kv_is_sdpa_over_repeated_heads(dtype, queries):
    query, key, value, mask = inputs(dtype, queries, 13)
    repeat_kv = ATTENTION_KERNELS["repeat_kv"]
    out = repeat_kv(query, key, value, mask, 0.2)
    assert same_bits(out, by_hand(query, key, value, mask))
    assert same_bits(repeat_kv(query, key, value, None, 0.2), by_hand(query, key, value, None, causal=queries > 1))
    assert not same_bits(out, by_hand(query, key.flip(1), value.flip(1), mask))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_gqa_takes_a_single_query_head_by_head_as_rows(dtype):
    query, key, value, mask = inputs(dtype, 1, 13)
    rows = query.view(2, 2, 3, 32)  # heads 0-2 read K/V head 0, heads 3-5 head 1
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=0.2).reshape(2, 1, 6, 32)
    packed_gqa = ATTENTION_KERNELS["packed_gqa"]
    assert same_bits(packed_gqa(query, key, value, mask, 0.2), out)
    assert not same_bits(packed_gqa(query.flip(1), key, value, mask, 0.2), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_gqa_repeats_for_several_queries(dtype):
    query, key, value, mask = inputs(dtype, 13, 13)
    assert same_bits(ATTENTION_KERNELS["packed_gqa"](query, key, value, mask, 0.2), by_hand(query, key, value, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 13])
def test_enable_gqa_gives_the_bits_of_repeated_heads(dtype, queries):
    query, key, value, mask = inputs(dtype, queries, 13)
    grouped = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)
    repeated = by_hand(query, key, value, mask)
    assert same_bits(grouped.transpose(1, 2), repeated)
    moved = query.clone()
    moved[:, :, -1] += 1
    other = F.scaled_dot_product_attention(moved, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)
    assert not same_bits(other.transpose(1, 2), repeated)


def test_repeated_heads_stand_side_by_side():
    heads = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    assert repeat_heads(heads, 3).flatten().tolist() == [10, 10, 10, 20, 20, 20]
    assert repeat_heads(heads, 1) is heads


def test_kernels_agree_with_eager_to_rounding_only():
    """eager is the specification; the others are named because their bits may differ, their values may not."""
    query, key, value, mask = inputs(torch.bfloat16, 5, 13)
    eager = ATTENTION_KERNELS["eager"]
    for name in KERNELS:
        out = ATTENTION_KERNELS[name](query, key, value, mask, 0.2)
        assert error(out, eager(query, key, value, mask, 0.2).double()) <= 8 * 2**-8 * float(value.abs().max()), name
