"""A boundary: its replicas are isolated, continuations leave it alone, and nothing beyond its end is read."""

from itertools import permutations

import pytest
import torch

from cache import Boundary, KVCache, transplant
from cache.digest import cache_sha256
from cache.isolation import cache_tensors, disjoint, geometry
from decode import RowFailure, greedy_suffix
from tests.helpers import equal, refused


def test_replicas_are_equal_and_isolated_and_a_prefills_is_a_second_call(three, monkeypatch):
    calls, own = [], three.model.embed
    monkeypatch.setattr(three.model, "embed", lambda ids, roles: calls.append(ids.shape) or own(ids, roles))
    for boundary in (three.live, three.incremental, three.prefill):
        replica = boundary.replica()
        assert equal(boundary, replica) and replica.state == boundary.state
        assert disjoint(boundary.tensors(), replica.tensors())
        assert [geometry(x) for x in replica.tensors()] == [geometry(x) for x in boundary.tensors()]
        assert all(tensor.is_inference() for tensor in replica.tensors()), "also a rebuilt replica"
        assert not any(tensor.is_inference() for tensor in cache_tensors(boundary.cache.copy())), "the control"
        assert replica.record is not boundary.record and replica.record.sha256() == boundary.record.sha256()
        assert calls == ([(2, len(boundary.state))] if boundary is three.prefill else []), "the others are copies"
    assert equal(three.prefill.copy(), three.prefill) and len(calls) == 1
    with torch.inference_mode():
        replica.cache.keys(0).zero_()
    assert equal(replica.replica(), three.prefill) and not equal(replica, three.prefill)


def test_continuations_leave_the_boundary_alone_and_do_not_depend_on_their_order(three):
    """huggingface/transformers 37078, 32929 (case 15)."""
    before = three.hashes()
    continued = [three.prefill, three.incremental, transplant(recipient=three.prefill, donor=three.incremental)]
    alone = [greedy_suffix(three.model, boundary) for boundary in continued]
    for order in permutations(range(3)):
        results = {index: greedy_suffix(three.model, continued[index]) for index in order}
        assert [results[index] for index in range(3)] == alone and three.hashes() == before
    with refused("capacity"):  # the control: a boundary is compact, so that nothing can grow it in place
        three.prefill.cache.append(0, three.prefill.cache.keys(0), three.prefill.cache.values(0))
    written = three.prefill.cache.copy()
    written.values(2)[:, :, 3] = 1.0
    assert cache_sha256(written) != before[2][0]


def test_slots_beyond_the_boundary_do_not_matter(three):
    """A longer working copy whose free slots hold NaN gives the same suffix: they are never read."""
    suffix = greedy_suffix(three.model, three.live)

    class Dirty(KVCache):
        def copy(self, capacity=None):
            other = super().copy(capacity)
            for tensor in (*other._keys, *other._values):
                tensor[:, :, len(other) :] = float("nan")
            return other

    cache = three.live.cache.copy()
    cache.__class__ = Dirty
    dirty = Boundary("live", three.live.state, cache, three.live.logits, three.live.record)
    assert greedy_suffix(three.model, dirty) == suffix
    cache.values(2)[:, :, 3] = float("nan")
    with pytest.raises(RowFailure):
        greedy_suffix(three.model, dirty)
