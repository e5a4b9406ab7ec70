"""Transplants: exactly the chosen places come from the donor, nothing aliases, and a wrong one is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache import Boundary, KVCache, build_prefill, transplant
from cache.isolation import disjoint
from cache.transplant import whole_transplant_holds
from decode import RowFailure, State, greedy_suffix
from minimodel.bits import same_bits
from tests.helpers import flip_bit, random_tensor, refused


@pytest.fixture
def recipient(three):
    return three.prefill


@pytest.fixture
def donor(three):
    """The same prefix with every K/V element moved, so that each place tells whose it is. Copies stay equal."""
    cache = three.incremental.cache.copy()
    for index, (_, _, tensor) in enumerate(cache.tensors()):
        noise = random_tensor(1, *tensor.shape[1:], seed=index).abs() + 0.5
        tensor.add_(noise.to(tensor.dtype))
    return replace(three.incremental, cache=cache)


def expected(recipient: Boundary, donor: Boundary, chosen: Callable[[int, str, int, int], bool]) -> KVCache:
    """The transplant spelled out place by place: layer, tensor, position, head."""
    cache = recipient.cache.copy()
    for (layer, name, target), (_, _, source) in zip(cache.tensors(), donor.cache.tensors()):
        for position in range(len(cache)):
            for head in range(target.shape[1]):
                if chosen(layer, name, position, head):
                    target[:, head, position] = source[:, head, position]
    return cache


CHOICES = {
    "whole": ({}, lambda layer, name, position, head: True),
    "keys": ({"tensors": "k"}, lambda layer, name, position, head: name == "key"),
    "values": ({"tensors": "v"}, lambda layer, name, position, head: name == "value"),
    "one layer": ({"layers": [1]}, lambda layer, name, position, head: layer == 1),
    "layers": ({"layers": range(1, 3)}, lambda layer, name, position, head: layer >= 1),
    "positions": ({"positions": [0, 7, 8]}, lambda layer, name, position, head: position in (0, 7, 8)),
    "one head": ({"heads": [1]}, lambda layer, name, position, head: head == 1),
    "all at once": (
        {"layers": {0, 2}, "tensors": "v", "positions": (5, 3), "heads": (0,)},
        lambda layer, name, position, head: layer != 1 and name == "value" and position in (3, 5) and head == 0,
    ),
    "nothing": ({"layers": []}, lambda layer, name, position, head: False),
    "no position": ({"positions": []}, lambda layer, name, position, head: False),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_exactly_the_chosen_places_are_the_donors(recipient, donor, choice):
    options, chosen = CHOICES[choice]
    result = transplant(recipient, donor, **options)
    wanted = expected(recipient, donor, chosen)
    assert result.cache.equals(wanted)
    assert same_bits(result.logits, recipient.logits) and result.state == recipient.state
    assert result.record.sha256() == recipient.record.sha256()
    assert disjoint(result.tensors(), recipient.tensors(), donor.tensors())
    assert result.cache.equals(donor.cache) == (choice == "whole")
    assert result.cache.equals(recipient.cache) == (choice in ("nothing", "no position"))
    flip_bit(wanted.values(2), (0, 0, 0, 0))
    assert not result.cache.equals(wanted)


def test_one_shot_iterables_serve(recipient, donor):
    result = transplant(
        recipient, donor, layers=(i for i in (0, 2)), positions=iter([3, 5]), heads=iter([0]), tensors="v"
    )
    assert result.cache.equals(expected(recipient, donor, CHOICES["all at once"][1]))


def test_writing_one_of_the_three_leaves_the_others(recipient, donor):
    result, mine, theirs = transplant(recipient, donor), recipient.cache.copy(), donor.cache.copy()
    with torch.inference_mode():
        for tensor in result.tensors():
            tensor.zero_()
    assert recipient.cache.equals(mine) and donor.cache.equals(theirs)


def test_the_result_is_named_and_its_replica_is_a_copy(three):
    into_prefill = transplant(recipient=three.prefill, donor=three.incremental)
    into_incremental = transplant(recipient=three.incremental, donor=three.prefill)
    assert into_prefill.construction == "incremental_cache_into_prefill"
    assert into_incremental.construction == "prefill_cache_into_incremental"
    assert into_prefill.cache.equals(three.incremental.cache) and into_incremental.cache.equals(three.prefill.cache)
    assert into_prefill.replica().cache.equals(three.incremental.cache), "a second call would give prefill's again"


def test_a_swapped_cache_recovers_the_donors_suffix(three, donor):
    """Paper, section 4.4: with equal boundary argmax the trajectory follows the cache."""
    for recipient, giver in ((three.prefill, three.incremental), (three.incremental, three.prefill)):
        result = greedy_suffix(three.model, transplant(recipient=recipient, donor=giver))
        wanted = greedy_suffix(three.model, giver)
        assert result.tokens == wanted.tokens and result.margins[1:] == wanted.margins[1:]
    far = greedy_suffix(three.model, donor)
    assert far.tokens != greedy_suffix(three.model, three.prefill).tokens, "the control: this donor leads elsewhere"
    assert greedy_suffix(three.model, transplant(three.prefill, donor)).tokens == far.tokens
    back = transplant(transplant(three.prefill, donor), three.prefill)
    assert greedy_suffix(three.model, back) == greedy_suffix(three.model, three.prefill)


def test_whole_transplant_holds_for_a_whole_one(recipient, donor):
    assert whole_transplant_holds(transplant(recipient, donor), recipient, donor)


def test_whole_transplant_holds_sees_one_wrong_thing(three, recipient, donor):
    good = transplant(recipient, donor)

    def spoiled(change):
        copy = replace(good, cache=good.cache.copy(), logits=good.logits.clone())
        return whole_transplant_holds(change(copy) or copy, recipient, donor)

    assert spoiled(lambda b: None)
    assert not spoiled(lambda b: flip_bit(b.cache.keys(0), (0, 0, 0, 0)))
    assert not spoiled(lambda b: flip_bit(b.cache.values(2), (1, 1, len(b.cache) - 1, 31)))
    assert not spoiled(lambda b: flip_bit(b.logits, (0, 5)))
    assert not spoiled(lambda b: replace(b, logits=b.logits.to(torch.float64)))
    assert not spoiled(lambda b: replace(b, logits=recipient.logits)), "shared with the recipient"
    assert not spoiled(lambda b: replace(b, cache=donor.cache)), "shared with the donor"
    assert not spoiled(lambda b: replace(b, cache=donor.cache.copy(len(donor.cache) + 1))), "another stride"
    assert not spoiled(lambda b: replace(b, record=replace_record(b)))
    assert not whole_transplant_holds(transplant(recipient, donor, tensors="k"), recipient, donor)
    assert not whole_transplant_holds(transplant(recipient, donor, layers=[0, 1]), recipient, donor)
    assert not whole_transplant_holds(recipient.replica(), recipient, donor)


def replace_record(boundary: Boundary) -> Any:
    record = boundary.record.copy()
    one = torch.ones(2, 1, dtype=torch.int64)
    record.enter(one, one, one, torch.ones(2, 1, 1, 1, dtype=torch.bool))
    return record


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tensors": "keys"}, ("tensors", "kv, k or v", "'keys'")),
        ({"tensors": ""}, ("tensors", "''")),
        ({"layers": [3]}, ("layers", "0 to 2", "3")),
        ({"layers": [-1]}, ("layers", "-1")),
        ({"layers": [True]}, ("layers", "True")),
        ({"layers": [1.0]}, ("layers", "1.0")),
        ({"positions": [10_000]}, ("positions", "10000")),
        ({"heads": [2]}, ("heads", "0 to 1", "2")),
    ],
)
def test_places_that_do_not_exist_are_refused(recipient, donor, options, parts):
    with refused("transplant", *parts):
        transplant(recipient, donor, **options)


def test_another_prefix_record_or_geometry_is_refused(three, contract):
    tokens = list(three.live.state.tokens)
    tokens[1] = tokens[1] + 1
    other = build_prefill(three.model, State.from_tokens(contract, tokens))
    with refused("one prefix"):
        transplant(three.prefill, other)
    with pytest.raises(RowFailure, match="one functional state"):
        transplant(three.prefill, replace(three.incremental, record=replace_record(three.incremental)))
    roomy = replace(three.incremental, cache=three.incremental.cache.copy(500))
    with refused("layer 0 key", "stride"):
        transplant(three.prefill, roomy)
    with refused("layer 0 key", "shape"):
        transplant(three.prefill, build_prefill(three.model, three.live.state, copies=1))
    wide = KVCache(3, 2, 2, len(tokens), 32, torch.float64, torch.device("cpu"))
    for layer in range(3):
        wide.append(layer, three.prefill.cache.keys(layer).double(), three.prefill.cache.values(layer).double())
    with refused("float64"):
        transplant(three.prefill, replace(three.incremental, cache=wide))
    shallow = KVCache(2, 2, 2, len(tokens), 32, three.prefill.cache.keys(0).dtype, torch.device("cpu"))
    for layer in range(2):
        shallow.append(layer, three.prefill.cache.keys(layer), three.prefill.cache.values(layer))
    with refused("layer counts", "3", "2"):
        transplant(three.prefill, replace(three.incremental, cache=shallow))


def test_a_donor_whose_copies_differ_fails_the_row(recipient, donor):
    flip_bit(donor.cache.keys(1), (1, 0, 4, 0))
    with pytest.raises(RowFailure, match="cache layer 1 key"):
        transplant(recipient, donor)
