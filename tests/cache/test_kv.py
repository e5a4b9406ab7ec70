"""Cache storage: it owns its length, gives views, copies alias nothing, and its digest is injective."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import KVCache
from cache.digest import cache_sha256, tensor_sha256
from cache.isolation import cache_tensors, disjoint, geometry, memory_ranges
from decode import RowFailure
from minimodel.bits import bits, same_bits
from tests.helpers import DTYPES, flip_bit, random_tensor, refused

CPU = torch.device("cpu")


def filled(length=5, capacity=8, dtype=torch.bfloat16, seed=0):
    """Two layers, two equal copies, two heads of size four."""
    cache = KVCache((2, 2, capacity, 4), dtype, [CPU] * 2)
    for layer in range(2 if length else 0):
        keys, values = (random_tensor(1, 2, length, 4, dtype=dtype, seed=seed + 2 * layer + i) for i in (0, 1))
        cache.append(layer, keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1))
    return cache


def ones(count):
    return torch.ones(2, 2, count, 4, dtype=torch.bfloat16)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_appends_in_any_portions_are_one_long_tensor(lengths):
    total, start = sum(lengths), 0
    cache = KVCache((2, 2, total, 4), torch.float32, [CPU] * 3)
    whole = [(random_tensor(2, 2, total, 4, seed=i), random_tensor(2, 2, total, 4, seed=10 + i)) for i in range(3)]
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


def test_the_capacity_is_a_limit_and_nothing_is_written_beyond_it():
    cache = filled(5, capacity=6)
    before = cache_sha256(cache)
    with refused("capacity 6", "7"):
        cache.append(0, ones(2), ones(2))
    assert cache_sha256(cache) == before and len(cache) == 5
    with refused(f"cache: expected {1 << 54} bytes of free memory for {1 << 47} tokens, found less"):
        KVCache((2, 2, 1 << 47, 4), torch.bfloat16, [CPU] * 2)


@pytest.mark.parametrize(
    "new",
    [
        torch.zeros(2, 2, 1, 4),
        *(torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((1, 2, 1, 4), (2, 1, 1, 4), (2, 2, 1, 1))),
    ],
)
def test_another_dtype_or_shape_is_refused_not_converted_or_spread(new):
    for pair, name in (((new, ones(1)), "keys"), ((ones(1), new), "values")):
        cache = filled()
        with refused("cache layer 0", name, "torch.bfloat16"):
            cache.append(0, *pair)
        cache.append(0, ones(1), ones(1))


def test_a_call_writes_every_layer_once_in_order_and_only_then_is_longer():
    cache = filled(5, capacity=8)
    before = cache_sha256(cache)
    for layer in (1, 2, -1):
        with refused("cache layer", "layer 0", str(layer)):
            cache.append(layer, ones(1), ones(1))
    cache.append(0, ones(1), ones(1))
    for layer in (0, 2):
        with refused("cache layer", "layer 1", str(layer)):
            cache.append(layer, ones(1), ones(1))
    with refused("cache layer 1", "1 tokens", "2"):
        cache.append(1, ones(2), ones(2))
    assert len(cache) == 5 and cache_sha256(cache) == before and cache.copy().equals(cache)
    cache.append(1, ones(1), ones(1))
    assert len(cache) == 6 and same_bits(cache.keys(1)[:, :, 5:], ones(1))


def test_views_follow_the_storage_and_slots_beyond_the_length_are_not_seen():
    cache, other = filled(5, capacity=8), filled(5, capacity=6)
    assert cache.equals(other) and cache_sha256(cache) == cache_sha256(other)
    cache._keys[0][:, :, 5:] = float("nan")
    cache.require_finite()
    assert cache.equals(other) and cache_sha256(cache) == cache_sha256(other)
    cache.keys(0)[0, 0, 4, 3] += 1
    assert not cache.equals(other) and cache_sha256(cache) != cache_sha256(other)


@pytest.mark.parametrize("capacity", [None, 5, 20])
def test_a_copy_is_equal_aliases_nothing_and_goes_on_alone(capacity):
    cache = filled(5, capacity=8)
    copy, before = cache.copy(capacity), cache_sha256(cache)
    assert copy.equals(cache) and len(copy) == 5 and copy.capacity == (capacity or 5)
    assert disjoint(cache_tensors(cache), cache_tensors(copy))
    for layer in range(2 if capacity == 20 else 0):
        copy.append(layer, ones(1), ones(1))
        assert (len(cache), len(copy)) == (5, 5 + layer)
    for tensor in cache_tensors(copy):
        tensor.zero_()
    assert cache_sha256(cache) == before != cache_sha256(copy)
    copy._values[1] = cache._values[1]
    assert not disjoint(cache_tensors(cache), cache_tensors(copy)), "the control"
    with refused("cache capacity", "5", "4"):
        cache.copy(4)


@pytest.mark.parametrize("count", [-1, 1.0, True, "2", None])
@pytest.mark.parametrize(("name", "axis"), [("batch", 0), ("capacity", 2)])
def test_a_size_that_is_no_count_is_refused_by_name(name, axis, count):
    shape = [2, 2, 0, 4]
    KVCache(shape, torch.float32, [CPU])
    shape[axis] = count
    with refused(f"cache {name}: expected a whole number of at least", repr(count)):
        KVCache(shape, torch.float32, [CPU])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_that_differ_in_one_bit_are_named(dtype):
    cache, signed = filled(dtype=dtype), filled(dtype=dtype)
    cache.require_equal_copies()
    flip_bit(cache.values(1), (1, 1, 4, 2))
    with pytest.raises(RowFailure, match="cache layer 1 value: the physical copies differ"):
        cache.require_equal_copies()
    signed.keys(0)[0, 0, 0, 0], signed.keys(0)[1, 0, 0, 0] = 0.0, -0.0
    with pytest.raises(RowFailure, match="cache layer 0 key"):
        signed.require_equal_copies()


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
    assert not cache.equals(KVCache((2, 2, 8, 4), torch.bfloat16, [CPU]))
    cache.values(0)[0, 0, 0, 0] = 0.0
    other = cache.copy()
    bits(other.values(0))[0, 0, 0, 0] = -(1 << 15)  # the sign bit alone: -0
    assert torch.equal(cache.values(0), other.values(0)) and not cache.equals(other)


def test_what_is_hashed_is_dtype_shape_and_bytes():
    tensor = torch.tensor([[1.0, 2.0, -0.0]])
    expected = hashlib.sha256(b"float32:1,3:" + np.array([1, 2, -0.0], dtype="<f4").tobytes()).hexdigest()
    assert tensor_sha256(tensor) == expected
    zeros = [
        torch.zeros(s, dtype=d) for d in (torch.bfloat16, torch.float16, torch.int16) for s in ((6,), (2, 3), (3, 2))
    ]
    zeros += [torch.zeros(3), torch.zeros(12, dtype=torch.uint8), torch.zeros(1, 6, dtype=torch.bfloat16)]
    zeros += [torch.zeros(0), torch.zeros(0, 4), -torch.zeros(3), torch.zeros(())]
    assert len({tensor_sha256(tensor) for tensor in zeros}) == len(zeros)
    nan = torch.full((2,), float("nan"))
    other = nan.clone()
    bits(other)[0] ^= 1
    assert tensor_sha256(nan) == tensor_sha256(nan.clone()) != tensor_sha256(other)


def test_layout_in_memory_does_not_count():
    tensor = random_tensor(4, 5, 6, dtype=torch.bfloat16)
    view = torch.zeros(8, 10, 12, dtype=torch.bfloat16)[::2, ::2, ::2]
    view.copy_(tensor)
    assert tensor_sha256(view) == tensor_sha256(tensor) == tensor_sha256(tensor.transpose(0, 2).clone().transpose(0, 2))
    assert tensor_sha256(tensor.transpose(0, 1)) != tensor_sha256(tensor)


def one_after_the_other(cache):
    """The plain path: every tensor in one piece, in order."""
    outer = hashlib.sha256(f"cache:{cache.layers}:".encode())
    for _, _, tensor in cache.tensors():
        header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:".encode()
        outer.update(hashlib.sha256(header + bits(tensor.contiguous()).numpy().tobytes()).digest())
    return outer.hexdigest()


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_a_cache_digest_covers_every_tensor_in_order_and_not_the_free_slots(length):
    cache = filled(length)
    assert (
        cache_sha256(cache) == cache_sha256(cache.copy()) == cache_sha256(cache.copy(20)) == one_after_the_other(cache)
    )
    changed = [cache]
    for layer, which in ((layer, which) for layer in range(2 if length else 0) for which in ("keys", "values")):
        changed.append(cache.copy())
        flip_bit(getattr(changed[-1], which)(layer), (1, 1, length - 1, 3))
        assert cache_sha256(changed[-1]) == one_after_the_other(changed[-1])
    if length:
        swapped = cache.copy()
        swapped.keys(0).copy_(cache.values(0))
        swapped.values(0).copy_(cache.keys(0))
        changed += [swapped, filled(0)]
    changed += [KVCache((copies, 2, 8, 4), torch.bfloat16, [CPU] * layers) for layers, copies in ((3, 2), (2, 1))]
    assert len({cache_sha256(one) for one in changed}) == len(changed)


def test_a_large_cache_is_hashed_where_it_lies():
    """16 MB with free slots behind."""
    cache = KVCache((2, 2, 4_000, 64), torch.bfloat16, [CPU] * 4)
    cache._length = 3_999
    for _, _, tensor in cache.tensors():
        tensor.zero_()

    def allocated(work):
        with torch.profiler.profile(profile_memory=True) as profile:
            work(cache)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    assert allocated(cache_sha256) < 100_000
    assert allocated(one_after_the_other) > 16_000_000, "the control: the plain path copies"


BUFFER = np.zeros(64, dtype=np.uint8)
spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 12)), max_size=7)


@given(spans)
def test_isolation_against_every_pair_of_bytes(items):
    """Tensors over one buffer, whose storages can overlap, interleave, nest or touch without being one."""
    groups, held = [[] for _ in range(4)], [set() for _ in range(4)]
    for group, start, length in items:
        groups[group].append(torch.from_numpy(BUFFER[start : start + length]))
        held[group] |= set(range(start, min(start + length, 64)))
    apart = all(not held[i] & held[j] for i in range(4) for j in range(i))
    assert disjoint(*groups) == apart


def test_views_of_one_storage_are_shared_even_where_they_do_not_meet():
    base, a, b = torch.zeros(10), torch.zeros(4), torch.zeros(4)
    for apart in (([a], [b]), ([a, a], [b]), (), ([a],), ([], [a]), ([base[:3].clone()], [base[7:]])):
        assert disjoint(*apart)
    views = ([base[:3]], [base[7:]]), ([base.view(2, 5)], [a, base[9:]]), ([a], [base[:1]], [base])
    for shared in (([a], [a]), *views):
        assert not disjoint(*shared)
    assert memory_ranges([torch.zeros(0)]) == [] and disjoint([torch.zeros(0)], [torch.zeros(0)])


def test_geometry_is_all_that_a_tensor_has_beside_its_bits():
    cache = filled(5, capacity=8)
    known = {"shape": [2, 2, 5, 4], "dtype": "bfloat16", "device": "cpu", "inference": False}
    assert geometry(cache.keys(0)) == {**known, "stride": [64, 32, 4, 1]}
    assert geometry(cache.copy().keys(0)) == {**known, "stride": [40, 20, 4, 1]}
    with torch.inference_mode():
        assert geometry(cache.copy().keys(0))["inference"]
