"""Digests: injective in dtype, shape and bytes, whatever the layout in memory."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cache.digest import cache_sha256, tensor_sha256
from cache.kv import KVCache
from minimodel.bits import bits, same_bits
from tests.cache.test_kv import CPU, filled
from tests.helpers import flip_bit, random_tensor


def test_what_is_hashed():
    tensor = torch.tensor([[1.0, 2.0, -0.0]])
    expected = hashlib.sha256(b"float32:1,3:" + np.array([1, 2, -0.0], dtype="<f4").tobytes()).hexdigest()
    assert tensor_sha256(tensor) == expected


def test_dtype_shape_sign_of_zero_and_nan_payload_count():
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


floats = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=3, max_side=3),
    elements=st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
)


@given(left=floats, right=floats)
def test_digests_are_equal_exactly_for_equal_bits(left, right):
    one, two = torch.from_numpy(left.copy()), torch.from_numpy(right.copy())
    assert (tensor_sha256(one) == tensor_sha256(two)) == same_bits(one, two)


def test_layout_in_memory_does_not_count():
    tensor = random_tensor(4, 5, 6, dtype=torch.bfloat16)
    view = torch.zeros(8, 10, 12, dtype=torch.bfloat16)[::2, ::2, ::2]
    view.copy_(tensor)
    assert tensor_sha256(view) == tensor_sha256(tensor) == tensor_sha256(tensor.transpose(0, 2).clone().transpose(0, 2))
    assert tensor_sha256(tensor.transpose(0, 1)) != tensor_sha256(tensor)


def test_a_cache_digest_covers_every_tensor_in_order():
    cache = filled()
    digests = {cache_sha256(cache)}
    for layer in range(2):
        for which in ("keys", "values"):
            other = cache.copy()
            flip_bit(getattr(other, which)(layer), (1, 1, 4, 3))
            digests.add(cache_sha256(other))
    swapped = cache.copy()
    swapped.keys(0).copy_(cache.values(0))
    swapped.values(0).copy_(cache.keys(0))
    digests |= {cache_sha256(swapped), cache_sha256(KVCache(2, 2, 2, 8, 4, torch.bfloat16, CPU))}
    digests.add(cache_sha256(KVCache(3, 2, 2, 8, 4, torch.bfloat16, CPU)))
    assert len(digests) == 8 and cache_sha256(cache.copy(20)) == cache_sha256(cache)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_number_of_copies_counts(copies):
    assert cache_sha256(KVCache(1, copies, 1, 1, 2, torch.float32, CPU)) != cache_sha256(
        KVCache(1, 3 - copies, 1, 1, 2, torch.float32, CPU)
    )


def one_after_the_other(cache: KVCache) -> str:
    """The plain path: every tensor in one piece, in order."""
    outer = hashlib.sha256(f"cache:{cache.layers}:".encode())
    for _, _, tensor in cache.tensors():
        header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:".encode()
        outer.update(hashlib.sha256(header + bits(tensor.contiguous()).numpy().tobytes()).digest())
    return outer.hexdigest()


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_a_cache_with_room_behind_has_the_plain_digest(length):
    cache = filled(length, 8) if length else KVCache(2, 2, 2, 8, 4, torch.bfloat16, CPU)
    assert cache_sha256(cache) == cache_sha256(cache.copy()) == one_after_the_other(cache)
    if length:
        other = cache.copy()
        flip_bit(other.values(1), (1, 1, length - 1, 3))
        assert cache_sha256(other) == one_after_the_other(other) != cache_sha256(cache)


def test_a_large_cache_is_hashed_where_it_lies():
    """16 MB with room behind."""
    cache = KVCache(4, 2, 2, 4_000, 64, torch.bfloat16, CPU)
    cache._length = 3_999
    for _, _, tensor in cache.tensors():
        tensor.zero_()
    assert allocated(lambda: cache_sha256(cache)) < 100_000
    assert allocated(lambda: one_after_the_other(cache)) > 16_000_000, "the control: the plain path copies"


def allocated(work: Callable[[], object]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
