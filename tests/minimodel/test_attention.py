"""Attention kernels: each against a float64 reference written out here, and against its own specification in bits."""

import math
import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from minimodel.attention import ATTENTION_KERNELS, repeat_kv, repeat_kv_literal
from minimodel.bits import same_bits
from minimodel.roles import causal_mask, zero_dead_rows
from tests.helpers import DTYPES, random_tensor

ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-22, torch.float64: 2**-48}  # a few half units in the last place
every_kernel = pytest.mark.parametrize("kernel", ATTENTION_KERNELS.values(), ids=ATTENTION_KERNELS)


def inputs(dtype, queries, keys, heads=6):
    """query, keys, values of two rows, two K/V heads of size 32, and a mask with holes that leaves every row a key."""
    mask = random_tensor(2, 1, queries, keys, seed=3) > -0.5
    mask &= causal_mask(queries, keys, torch.device("cpu"))
    mask[..., 0] = True
    key, value = (random_tensor(2, 2, keys, 32, dtype=dtype, seed=seed) for seed in (1, 2))
    return random_tensor(2, heads, queries, 32, dtype=dtype), key, value, mask


@cache
def case(dtype, queries, keys):
    """Inputs and their float64 reference, for every kernel."""
    given = inputs(dtype, queries, keys)
    return given, reference(*given, 0.2)


def reference(query, keys, values, mask, scaling):
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


def error(out, exact):
    return float((out.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 13), (13, 13), (5, 13)])
@every_kernel
def test_kernel_against_the_float64_reference(kernel, dtype, queries, keys):
    given, exact = case(dtype, queries, keys)
    query, key, value, mask = given
    before = [tensor.clone() for tensor in given]
    out = kernel(*given, 0.2)
    assert out.dtype == dtype and out.shape == (2, queries, 6, 32)
    assert all(map(same_bits, given, before)), "inputs are not written"
    bound = 4 * ROUNDING[dtype] * float(value.double().abs().max())
    assert error(out, exact) <= bound
    if keys > 1:  # the controls: another scaling, a hole in the mask, heads in another order
        assert error(kernel(*given, 0.4), exact) > bound
        holed = mask.clone()
        holed[..., 0], holed[..., 1] = False, True
        assert error(kernel(query, key, value, holed, 0.2), exact) > bound
        assert error(kernel(query, key.flip(1), value.flip(1), mask, 0.2), exact) > bound


@pytest.mark.parametrize("queries", [1, 2, 5, 9])
@every_kernel
def test_no_mask_means_causal_from_the_last_key(kernel, queries):
    """SDPA's is_causal counts rows from the first key; a decoder whose cache holds tokens means the last ones."""
    query, key, value, _ = inputs(torch.float64, queries, 9)
    mask = causal_mask(queries, 9, query.device)
    out = kernel(query, key, value, None, 0.2)
    assert error(out, reference(query, key, value, mask, 0.2)) < 1e-12
    if 1 < queries < 9:
        assert same_bits(out, kernel(query, key, value, mask, 0.2))
        top_left = reference(query, key, value, causal_mask(9, 9, query.device)[:, :, :queries], 0.2)
        assert error(out, top_left) > 1e-3, "the control: the other reading is another result"


@pytest.mark.parametrize("queries", [1, 3])
@every_kernel
def test_fourteen_query_heads_over_two(kernel, queries):
    """onnx/onnx 7274 (case 7): V of head 0 all 1, of head 1 all 2."""
    query, key, _, mask = inputs(torch.float32, queries, 5, heads=14)
    value = torch.ones(2, 2, 5, 32)
    value[:, 1] = 2
    expected = torch.ones(2, queries, 14, 32)
    expected[:, :, 7:] = 2
    assert error(kernel(query, key, value, mask, 0.2), expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 4])
@every_kernel
def test_dead_rows_are_zeros_and_nothing_they_see_matters(kernel, queries, dtype):
    """pytorch/pytorch 103749 (case 4)."""
    query, key, value, mask = inputs(dtype, queries, 6)
    dead = slice(0, 1) if queries == 1 else slice(1, 3)
    mask[0, 0, dead] = False
    out = kernel(query, key, value, mask, 0.2)
    assert not out.isnan().any() and not out[0, dead].any() and bool(out[1].abs().sum((1, 2)).gt(0).all())
    other = query.clone()
    other[0, :, dead] = 50.0
    assert same_bits(kernel(other, key, value, mask, 0.2), out)


def test_dead_rows_are_found_though_only_the_diagonal_is_looked_at_first():
    out = random_tensor(2, 3, 4, 8)
    mask = torch.ones(2, 1, 4, 6, dtype=torch.bool).tril(2)
    assert zero_dead_rows(out, mask) is out
    mask[1, 0, 2] = False
    expected = out.clone()
    expected[1, :, 2] = 0
    assert same_bits(zero_dead_rows(out, mask), expected)
    mask[1, 0, 2, 0] = True  # not itself, but something: alive
    assert same_bits(zero_dead_rows(out, mask), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 6])
@every_kernel
def test_masked_keys_and_the_free_slots_of_a_longer_cache_move_no_bit(kernel, queries, dtype):
    query, key, value, mask = inputs(dtype, queries, 13)
    mask[..., 3] = False
    out = kernel(query, key, value, mask, 0.2)
    longer = torch.full((2, 2, 2, 40, 32), float("nan"), dtype=dtype)
    longer[..., :13, :] = torch.stack((key, value))
    longer[..., 3, :] = 7.0
    assert same_bits(kernel(query, *longer[..., :13, :], mask, 0.2), out)
    longer[1, :, :, 0] = -9.0  # which every query sees
    assert not same_bits(kernel(query, *longer[..., :13, :], mask, 0.2), out)


def by_hand(query, keys, values, mask, causal=False):
    """SDPA with the heads repeated by torch's own repeat_interleave."""
    repeated = [x.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for x in (keys, values)]
    return F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.2, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("queries", [1, 13])
def test_repeat_kv_is_sdpa_over_repeated_heads_and_packed_gqa_too_for_several_queries(dtype, queries):
    query, key, value, mask = inputs(dtype, queries, 13)
    out = repeat_kv(query, key, value, mask, 0.2)
    assert same_bits(out, by_hand(query, key, value, mask))
    assert same_bits(repeat_kv(query, key, value, None, 0.2), by_hand(query, key, value, None, causal=queries > 1))
    assert not same_bits(out, by_hand(query, key.flip(1), value.flip(1), mask))
    assert queries == 1 or same_bits(ATTENTION_KERNELS["packed_gqa"](query, key, value, mask, 0.2), out)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_packed_gqa_takes_a_single_query_head_by_head_as_rows(dtype):
    query, key, value, mask = inputs(dtype, 1, 13)
    rows = query.view(2, 2, 3, 32)  # heads 0-2 read K/V head 0, heads 3-5 head 1
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=0.2).reshape(2, 1, 6, 32)
    packed_gqa = ATTENTION_KERNELS["packed_gqa"]
    assert same_bits(packed_gqa(query, key, value, mask, 0.2), out)
    assert not same_bits(packed_gqa(query.flip(1), key, value, mask, 0.2), out)


def random_case(rng, dtype, groups):
    """Queries that lie as projections leave them, K/V as a cache gives them, and a mask of one of four kinds."""
    batch, kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 20, 32, 64])
    length, kind = rng.choice([1, 1, 2, 5, 17, 40]), rng.choice(["none", "causal", "holes", "dead"])
    key_length = length if kind == "none" and length > 1 else length + rng.choice([0, 1, 30, 300])
    query = random_tensor(batch, length, kv_heads * groups, head_dim, dtype=dtype, seed=rng.randrange(1 << 30))
    capacity = key_length + rng.choice([0, 3, 40])
    keys, values = (
        random_tensor(batch, kv_heads, capacity, head_dim, dtype=dtype, seed=rng.randrange(1 << 30))[:, :, :key_length]
        for _ in "kv"
    )
    if kind == "none":
        return query.transpose(1, 2), keys, values, None
    mask = random_tensor(batch, 1, length, key_length, seed=rng.randrange(1 << 30)) > 0
    if kind == "causal":
        mask = torch.ones(1, 1, length, key_length, dtype=torch.bool).tril(key_length - length)
    elif kind == "dead":
        mask[:, :, ::3] = False
    mask = mask[:1].expand(batch, -1, -1, -1) if rng.random() < 0.5 else mask
    return query.transpose(1, 2), keys, values, mask


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeat_kv_has_the_bits_of_repeated_heads(dtype, threads, fresh_threads):
    torch.set_num_threads(threads)
    rng, moved = random.Random(f"{dtype}{threads}"), 0
    for groups in range(1, 9):
        for _ in range(4):
            case = random_case(rng, dtype, groups)
            scaling = case[0].shape[-1] ** -0.5
            fast, literal, other = (
                kernel(*case, scaling).contiguous()
                for kernel in (repeat_kv, repeat_kv_literal, ATTENTION_KERNELS["eager"])
            )
            assert same_bits(fast, literal), (groups, case[0].shape, case[1].shape)
            moved += not same_bits(other, literal)
    assert moved > 0, "another order of sums must show, or the comparison sees nothing"


def test_repeat_kv_trains_by_the_repeated_form():
    query, keys = random_tensor(1, 4, 6, 8), random_tensor(1, 2, 6, 8, seed=1)
    gradients = []
    for kernel in (repeat_kv, repeat_kv_literal):
        q, k = query.clone().requires_grad_(), keys.clone().requires_grad_()
        kernel(q, k, k, None, 0.3).square().sum().backward()
        assert k.grad is not None and bool(k.grad.abs().sum() > 0)
        gradients.append(k.grad)
    assert same_bits(*gradients)
