"""The three constructions: which are equal bit for bit, what one wrong thing does, and what is refused."""

import pytest
import torch

from cache import KVCache, build_incremental, build_live, build_prefill, compare
from cache.isolation import disjoint
from decode import RowFailure, State, greedy_suffix
from decode.greedy import alone, generate
from decode.stepper import Stepper
from minimodel import load_model
from minimodel.bits import same_bits
from tests.conftest import build_three, numeric
from tests.helpers import equal, flip_bit, refused


def test_live_incremental_and_single_token_prefill_are_one_in_every_bit(three):
    chunked = build_prefill(three.model, three.live.state, chunk=1)
    assert equal(three.live, three.incremental) and equal(three.live, chunked)
    assert compare(three.live.cache, three.incremental.cache).exact
    assert len(three.live.cache) == len(three.live.state) == three.live.cache.capacity
    for layer in range(3):  # the controls: one bit anywhere, in the cache or in the logits
        for which in ("keys", "values"):
            cache = three.incremental.cache.copy()
            flip_bit(getattr(cache, which)(layer), (1, 1, len(cache) - 1, 31))
            assert not three.live.cache.equals(cache) and not compare(three.live.cache, cache).exact
    logits = three.incremental.logits.clone()
    flip_bit(logits, (0, 287))
    assert not same_bits(three.live.logits, logits)


@torch.inference_mode()
def stepped(three, position=None, role=None, stale=False):
    """Incremental by hand, with one thing wrong at slot 20: its position, its role, or a K/V slot left as it was."""
    state, cache = three.live.state, KVCache.for_model(three.model, 2, len(three.live.state))
    stepper = Stepper(three.model, cache, 2, len(state))
    for slot, (token, own) in enumerate(zip(state.tokens, state.roles)):
        if slot == 20 and position is not None:
            stepper._positions = stepper._positions.clone()
            stepper._positions[:, 20] = position
        stepper.feed(token, role if slot == 20 and role is not None else own)
        if slot == 20 and stale:
            cache.keys(1)[:, :, 20] = cache.keys(1)[:, :, 19]
    return compare(three.live.cache, cache).first_difference, stepper.record.sha256()


def test_another_position_role_or_stale_slot_shows_in_the_bits(three):
    record = three.live.record.sha256()
    assert stepped(three) == (None, record)
    first = {"layer": 0, "tensor": "key", "position": 20}
    assert stepped(three, position=21)[0] == first and stepped(three, stale=True)[0] == {**first, "layer": 1}
    other, other_record = stepped(three, role=(three.live.state.roles[20] + 1) % 6)
    assert other["position"] == 20 and other_record != record, "the functional record sees the role"


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        *((kernels, dtype) for kernels in ("repeat_kv", "packed_gqa", "eager/plain") for dtype in ("bf16", "fp32")),
        ("blocked/plain", "bf16"),
    ],
)
def test_continuing_the_retained_storage_in_place_is_continuing_its_copy(tiny_directory, prompt, kernels, dtype):
    """Live decoding that simply goes on, to the end of the answer, on the storage that it filled."""
    model = load_model(tiny_directory, numeric(dtype, kernels=kernels))
    contract, live = prompt.contract, build_live(model, prompt)
    assert State.from_tokens(contract, live.state.tokens) == live.state and live.state.structure.at_boundary
    suffix, end = greedy_suffix(model, live), len(live.state)
    capacity = contract.prefix_limit(len(prompt)) + contract.suffix_limit()
    retained = KVCache.for_model(model, 2, capacity)
    stepper = Stepper(model, retained, 2, capacity)
    with torch.inference_mode():
        for token, role in zip(prompt.tokens, prompt.roles):
            stepper.feed(token, role)
        out = alone(generate(stepper, contract, prompt.structure, None, lambda structure: structure.done))
    assert (*prompt.tokens, *out.tokens) == live.state.tokens + suffix.tokens
    assert (out.margins, stepper.record.sha256()) == (live.margins + suffix.margins, suffix.functional_sha256)
    kept = zip(retained.tensors(), live.cache.tensors())
    assert all(same_bits(whole[:, :, :end], own) for (_, _, whole), (_, _, own) in kept)


def test_a_compact_copy_of_other_bits_fails_the_row(bf16, prompt, monkeypatch):
    real, roomy = KVCache.copy, KVCache.for_model

    def spoiled(cache, capacity=None):
        copy = real(cache, capacity)
        for row in range(copy.batch):
            flip_bit(copy.keys(2), (row, 0, 7, 1))
        return copy

    monkeypatch.setattr(KVCache, "for_model", lambda model, copies, capacity: roomy(model, copies, capacity + 1))
    assert build_live(bf16, prompt).cache.capacity == len(build_live(bf16, prompt).state), "compact all the same"
    monkeypatch.setattr(KVCache, "copy", spoiled)
    with pytest.raises(RowFailure, match="compact cache"):
        build_live(bf16, prompt)


def test_the_same_construction_twice_is_the_same_bits_in_other_memory(three, prompt):
    """huggingface/transformers 36536, 25420 (case 1)."""
    again = build_three(three.model, prompt)
    assert again.live.state == three.live.state and again.hashes() == three.hashes()
    assert disjoint(*(boundary.tensors() for t in (three, again) for boundary in (t.live, t.incremental, t.prefill)))


def test_prefill_against_incremental_is_a_measurement(three):
    """The other half of case 1: exact or not, where first, how much; never "equal within tolerance"."""
    measured = compare(three.incremental.cache, three.prefill.cache).as_dict()
    assert measured["exact"] == three.incremental.cache.equals(three.prefill.cache) == (measured["differing"] == 0)
    assert (measured["first_difference"] is None) == measured["exact"] == (measured["relative_l2"] == 0)
    assert measured["relative_l2"] < 0.02 and measured["elements"] == 3 * 2 * 2 * 2 * len(three.live.state) * 32
    assert three.prefill.record.sha256() == three.incremental.record.sha256()


@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_prefill_in_chunks_shows_the_decoder_the_same_things(three, chunk):
    chunked = build_prefill(three.model, three.live.state, chunk=chunk)
    assert chunked.record.sha256() == three.prefill.record.sha256() and len(chunked.cache) == len(three.live.state)
    assert equal(chunked, chunked.replica())
    assert chunk < 1000 or equal(chunked, three.prefill), "one chunk is one call"
    assert compare(chunked.cache, three.prefill.cache).as_dict()["relative_l2"] < 0.02


def test_a_state_that_is_no_boundary_and_a_chunk_that_is_no_positive_number_are_refused(three, contract, prompt):
    tokens = three.live.state.tokens
    for state in (prompt, State.from_tokens(contract, tokens[:-1]), State.from_tokens(contract, [*tokens, 5])):
        for build in (build_incremental, build_prefill):
            with refused("boundary", "merge's opening delimiter"):
                build(three.model, state)
    for state in (three.live.state, State.from_tokens(contract, prompt.tokens[:-1]), State.from_tokens(contract, [])):
        with refused("live", "prompt's closing delimiter"):
            build_live(three.model, state)
    for chunk in (0, -1, 2.0, True):
        with refused("chunk", repr(chunk)):
            build_prefill(three.model, three.live.state, chunk=chunk)


def test_observed_constructions_have_the_same_bits(three):
    for build, boundary, embeds in ((build_prefill, three.prefill, 1), (build_incremental, three.incremental, None)):
        seen = []
        assert equal(
            build(three.model, three.live.state, observe=lambda name, _, seen=seen: seen.append(name)), boundary
        )
        assert seen[0] == "embed" and seen[-1] == "logits" and seen.count("logits") == 1
        assert seen.count("embed") == seen.count("norm") == (embeds or len(three.live.state))


@pytest.mark.parametrize("build", [build_incremental, build_prefill])
@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("embed", lambda out: flip_bit(out, (1, 0, 0)), r"cache layer 0 .*copies differ"),
        ("embed", lambda out: out.fill_(float("nan")), r"cache layer 0 key: expected finite"),
        ("logits", lambda out: flip_bit(out, (1, 0, 9)), r"boundary logits: the physical copies differ"),
    ],
)
def test_copies_that_differ_or_are_nan_fail_the_row(bf16, three, build, name, edit, message, monkeypatch):
    own = getattr(bf16, name)

    def edited(*given):
        out = own(*given).clone()
        edit(out)
        return out

    monkeypatch.setattr(bf16, name, edited)
    with pytest.raises(RowFailure, match=message):
        build(bf16, three.live.state)
