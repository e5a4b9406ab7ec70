"""Cache storage: it owns its length, gives views, and copies alias nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import KVCache
from cache.digest import cache_sha256
from cache.isolation import cache_tensors, disjoint
from decode import RowFailure
from minimodel.bits import bits, same_bits
from tests.helpers import flip_bit, random_tensor, refused

CPU = torch.device("cpu")


def filled(length: int = 5, capacity: int = 8, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> KVCache:
    """Two layers, two equal copies, two heads of size four."""
    cache = KVCache(2, 2, 2, capacity, 4, dtype, CPU)
    for layer in range(2):
        keys, values = (random_tensor(1, 2, length, 4, dtype=dtype, seed=seed + 2 * layer + i) for i in (0, 1))
        cache.append(layer, keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1))
    return cache


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_appends_in_any_portions_are_one_long_tensor(lengths):
    total = sum(lengths)
    cache = KVCache(3, 2, 2, total, 4, torch.float32, CPU)
    whole = [(random_tensor(2, 2, total, 4, seed=i), random_tensor(2, 2, total, 4, seed=10 + i)) for i in range(3)]
    start = 0
    for length in lengths:
        stop = start + length
        for layer, (keys, values) in enumerate(whole):
            assert len(cache) == start, "the length moves when the last layer has been written"
            seen = cache.append(layer, keys[:, :, start:stop], values[:, :, start:stop])
            assert all(same_bits(s, w[:, :, :stop]) for s, w in zip(seen, whole[layer]))
        start = stop
        assert len(cache) == start
    for layer, (keys, values) in enumerate(whole):
        assert same_bits(cache.keys(layer), keys) and same_bits(cache.values(layer), values)
        assert not same_bits(cache.keys(layer), values)


def test_for_model_has_the_models_geometry(bf16):
    cache = KVCache.for_model(bf16, batch=2, capacity=40)
    assert (cache.layers, cache.batch, cache.capacity, len(cache)) == (3, 2, 40, 0)
    assert cache.keys(0).shape == (2, 2, 0, 32) and cache.keys(0).dtype == torch.bfloat16
    assert [(layer, name) for layer, name, _ in cache.tensors()] == [(i, n) for i in range(3) for n in ("key", "value")]


def test_the_capacity_is_a_limit_and_nothing_is_written_beyond_it():
    cache = filled(5, capacity=6)
    before = cache_sha256(cache)
    with refused("capacity 6", "7"):
        cache.append(0, torch.zeros(2, 2, 2, 4, dtype=torch.bfloat16), torch.zeros(2, 2, 2, 4, dtype=torch.bfloat16))
    assert cache_sha256(cache) == before and len(cache) == 5


@pytest.mark.parametrize(
    "new",
    [
        torch.zeros(2, 2, 1, 4),
        torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16),
        torch.zeros(2, 1, 1, 4, dtype=torch.bfloat16),
        torch.zeros(2, 2, 1, 1, dtype=torch.bfloat16),
    ],
)
def test_another_dtype_or_shape_is_refused_not_converted_or_spread(new):
    good = torch.zeros(2, 2, 1, 4, dtype=torch.bfloat16)
    for pair, name in (((new, good), "keys"), ((good, new), "values")):
        cache = filled()
        with refused("cache layer 0", name, "torch.bfloat16"):
            cache.append(0, *pair)
        cache.append(0, good, good)


def test_a_call_writes_every_layer_once_in_order_and_only_then_is_longer():
    one, two = (torch.ones(2, 2, count, 4, dtype=torch.bfloat16) for count in (1, 2))
    cache = filled(5, capacity=8)
    before = cache_sha256(cache)
    for layer in (1, 2, -1):
        with refused("cache layer", "layer 0", str(layer)):
            cache.append(layer, one, one)
    cache.append(0, one, one)
    for layer in (0, 2):
        with refused("cache layer", "layer 1", str(layer)):
            cache.append(layer, one, one)
    with refused("cache layer 1", "1 tokens", "2"):
        cache.append(1, two, two)
    assert len(cache) == 5 and cache_sha256(cache) == before and cache.copy().equals(cache)
    cache.append(1, one, one)
    assert len(cache) == 6 and same_bits(cache.keys(1)[:, :, 5:], one)


def test_views_follow_the_storage_and_slots_beyond_the_length_are_not_seen():
    cache, other = filled(5, capacity=8), filled(5, capacity=6)
    assert cache.equals(other) and cache_sha256(cache) == cache_sha256(other)
    cache._keys[0][:, :, 5:] = float("nan")
    cache.require_finite()
    assert cache.equals(other) and cache_sha256(cache) == cache_sha256(other)
    cache.keys(0)[0, 0, 4, 3] += 1
    assert not cache.equals(other) and cache_sha256(cache) != cache_sha256(other)


@pytest.mark.parametrize("capacity", [None, 5, 20])
def test_a_copy_is_equal_and_aliases_nothing(capacity):
    cache = filled(5, capacity=8)
    copy = cache.copy(capacity)
    assert copy.equals(cache) and len(copy) == 5 and copy.capacity == (capacity or 5)
    assert disjoint(cache_tensors(cache), cache_tensors(copy))
    before = cache_sha256(cache)
    for tensor in cache_tensors(copy):
        tensor.zero_()
    assert cache_sha256(cache) == before != cache_sha256(copy)


def test_a_copy_cannot_be_smaller_than_what_it_holds():
    with refused("cache capacity", "5", "4"):
        filled(5).copy(4)


def test_a_copy_with_room_goes_on_alone():
    cache = filled(5, capacity=5)
    copy = cache.copy(6)
    for layer in range(2):
        copy.append(layer, torch.ones(2, 2, 1, 4, dtype=torch.bfloat16), torch.ones(2, 2, 1, 4, dtype=torch.bfloat16))
    assert (len(cache), len(copy)) == (5, 6) and same_bits(copy.keys(1)[:, :, :5], cache.keys(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_copies_that_differ_in_one_bit_are_named(dtype):
    cache = filled(dtype=dtype)
    cache.require_equal_copies()
    flip_bit(cache.values(1), (1, 1, 4, 2))
    with pytest.raises(RowFailure, match="cache layer 1 value: the physical copies differ"):
        cache.require_equal_copies()
    minus = filled(dtype=dtype)
    minus.keys(0)[0, 0, 0, 0], minus.keys(0)[1, 0, 0, 0] = 0.0, -0.0
    with pytest.raises(RowFailure, match="cache layer 0 key"):
        minus.require_equal_copies()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_fails_the_row_and_is_named(value):
    """pytorch/pytorch 137337 (case 17): bits may be equal, and the row fails all the same."""
    cache = filled()
    cache.require_finite()
    cache.keys(1)[:, 0, 2, 0] = value
    assert cache.equals(cache.copy())
    with pytest.raises(RowFailure, match="cache layer 1 key: expected finite"):
        cache.require_finite()


def test_equality_is_of_bits_dtype_shape_and_layers():
    cache = filled()
    assert cache.equals(filled()) and not cache.equals(filled(seed=1)) and not cache.equals(filled(4))
    assert not filled(dtype=torch.float16).equals(filled(dtype=torch.bfloat16))
    assert not cache.equals(KVCache(1, 2, 2, 8, 4, torch.bfloat16, CPU))
    signed = filled()
    signed.values(0)[0, 0, 0, 0] = 0.0
    other = signed.copy()
    bits(other.values(0))[0, 0, 0, 0] = -(1 << 15)  # the sign bit alone: -0
    assert torch.equal(signed.values(0), other.values(0)) and not signed.equals(other)
