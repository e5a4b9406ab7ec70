"""Storage isolation: shared, overlapping and interleaved memory is seen, whatever the views say."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.isolation import cache_tensors, disjoint, geometry, memory_ranges
from tests.cache.test_kv import filled

BUFFER = np.zeros(64, dtype=np.uint8)


def span(start: int, stop: int) -> torch.Tensor:
    """A tensor whose storage is bytes start to stop of one buffer: storages that can overlap without being one."""
    return torch.from_numpy(BUFFER[start:stop])


def test_separate_tensors_are_disjoint_and_a_tensor_is_not_from_itself():
    a, b = torch.zeros(4), torch.zeros(4)
    assert disjoint([a], [b]) and disjoint([a, a], [b]) and disjoint() and disjoint([a]) and disjoint([], [a])
    assert not disjoint([a], [a])


def test_views_of_one_storage_are_shared_even_where_they_do_not_meet():
    base = torch.zeros(10)
    assert not disjoint([base[:3]], [base[7:]])
    assert not disjoint([base.view(2, 5)], [torch.zeros(2), base[9:]])
    assert not disjoint([torch.zeros(2)], [base[:1]], [base.detach()])
    assert disjoint([base[:3].clone()], [base[7:]])


def test_overlapping_interleaved_and_nested_ranges_are_shared():
    assert disjoint([span(0, 8)], [span(8, 16)]), "neighbours touch and do not overlap"
    assert not disjoint([span(0, 9)], [span(8, 16)])
    assert not disjoint([span(0, 64)], [span(30, 31)])
    assert not disjoint([span(0, 20), span(40, 60)], [span(20, 41)])
    assert not disjoint([span(0, 60), span(10, 12)], [span(50, 55)]), "a short range of the same group lies between"
    assert disjoint([span(0, 8), span(16, 24)], [span(8, 16), span(24, 32)]), "interleaved without meeting"
    assert not disjoint([span(0, 8)], [span(16, 24)], [span(4, 6)])


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 12)), max_size=7)


@given(spans)
def test_against_every_pair_of_bytes(items):
    groups = [[], [], [], []]
    held = [set(), set(), set(), set()]
    for group, start, length in items:
        stop = min(start + length, 64)
        groups[group].append(span(start, stop))
        held[group] |= set(range(start, stop))
    apart = all(not held[i] & held[j] for i in range(4) for j in range(i))
    assert disjoint(*groups) == apart


def test_empty_tensors_own_nothing():
    assert memory_ranges([torch.zeros(0)]) == [] and disjoint([torch.zeros(0)], [torch.zeros(0)])


def test_caches_and_their_copies():
    cache = filled()
    copy = cache.copy()
    assert disjoint(cache_tensors(cache), cache_tensors(copy))
    copy._values[1] = cache._values[1]
    assert not disjoint(cache_tensors(cache), cache_tensors(copy))


def test_geometry_is_all_that_a_tensor_has_beside_its_bits():
    cache = filled(5, capacity=8)
    assert geometry(cache.keys(0)) == {
        "shape": [2, 2, 5, 4],
        "stride": [64, 32, 4, 1],
        "dtype": "bfloat16",
        "device": "cpu",
        "inference": False,
    }
    assert geometry(cache.copy().keys(0))["stride"] == [40, 20, 4, 1]
    with torch.inference_mode():
        assert geometry(cache.copy().keys(0))["inference"]
