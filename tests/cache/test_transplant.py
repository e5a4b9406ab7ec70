"""Transplants: exactly the chosen places come from the donor, nothing aliases, and a wrong one is seen."""

from dataclasses import replace

import pytest
import torch

from cache import KVCache, build_prefill, transplant
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
    """The same prefix with every K/V element moved, so that each place shows its source. Copies stay equal."""
    cache = three.incremental.cache.copy()
    for index, (_, _, tensor) in enumerate(cache.tensors()):
        tensor.add_((random_tensor(1, *tensor.shape[1:], seed=index).abs() + 0.5).to(tensor.dtype))
    return replace(three.incremental, cache=cache)


CHOICES = {  # options, and whether the donor's element stands at a layer, tensor, position and head
    "whole": ({}, lambda layer, name, position, head: True),
    "keys": ({"tensors": "k"}, lambda layer, name, position, head: name == "key"),
    "values": ({"tensors": "v"}, lambda layer, name, position, head: name == "value"),
    "one layer": ({"layers": [1]}, lambda layer, name, position, head: layer == 1),
    "layers": ({"layers": range(1, 3)}, lambda layer, name, position, head: layer >= 1),
    "positions": ({"positions": [0, 7, 8]}, lambda layer, name, position, head: position in (0, 7, 8)),
    "one head": ({"heads": [1]}, lambda layer, name, position, head: head == 1),
    "all at once, as one-shot iterables": (
        {"layers": {0, 2}, "tensors": "v", "positions": (5, 3), "heads": (0,)},
        lambda layer, name, position, head: layer != 1 and name == "value" and position in (3, 5) and head == 0,
    ),
    "nothing": ({"layers": []}, lambda layer, name, position, head: False),
    "no position": ({"positions": []}, lambda layer, name, position, head: False),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_exactly_the_chosen_places_are_the_donors(recipient, donor, choice):
    options, chosen = CHOICES[choice]
    if choice.startswith("all"):
        options = {key: value if key == "tensors" else iter(value) for key, value in options.items()}
    result, wanted = transplant(recipient, donor, **options), recipient.cache.copy()
    for (layer, name, target), (_, _, source) in zip(wanted.tensors(), donor.cache.tensors()):
        for position in range(len(wanted)):
            for head in range(target.shape[1]):
                if chosen(layer, name, position, head):
                    target[:, head, position] = source[:, head, position]
    assert result.cache.equals(wanted)
    assert same_bits(result.logits, recipient.logits) and result.state == recipient.state
    assert result.record.sha256() == recipient.record.sha256()
    assert disjoint(result.tensors(), recipient.tensors(), donor.tensors())
    assert result.cache.equals(donor.cache) == (choice == "whole")
    assert result.cache.equals(recipient.cache) == (choice in ("nothing", "no position"))
    flip_bit(wanted.values(2), (0, 0, 0, 0))
    assert not result.cache.equals(wanted)


def test_the_result_is_named_and_its_replica_is_a_copy(three):
    for recipient, donor, name in (
        (three.prefill, three.incremental, "incremental_cache_into_prefill"),
        (three.incremental, three.prefill, "prefill_cache_into_incremental"),
    ):
        made = transplant(recipient=recipient, donor=donor)
        assert made.construction == name and made.cache.equals(donor.cache)
        assert made.replica().cache.equals(donor.cache), "a second call would give prefill's again"


def test_a_swapped_cache_recovers_the_donors_suffix(three, donor):
    """Paper, section 4.4: with equal boundary argmax the trajectory follows the cache."""
    for recipient, giver in ((three.prefill, three.incremental), (three.incremental, three.prefill)):
        result = greedy_suffix(three.model, transplant(recipient=recipient, donor=giver))
        wanted = greedy_suffix(three.model, giver)
        assert result.tokens == wanted.tokens and result.margins[1:] == wanted.margins[1:]
    own, far = greedy_suffix(three.model, three.prefill), greedy_suffix(three.model, donor)
    assert far.tokens != own.tokens, "the control: this donor leads elsewhere"
    swapped = transplant(three.prefill, donor)
    assert greedy_suffix(three.model, swapped).tokens == far.tokens
    assert greedy_suffix(three.model, transplant(swapped, three.prefill)) == own


def another_record(boundary):
    record, one = boundary.record.copy(), torch.ones(2, 1, dtype=torch.int64)
    record.enter(one, one, one, torch.ones(2, 1, 1, 1, dtype=torch.bool))
    return replace(boundary, record=record)


def test_whole_transplant_holds_for_a_whole_one_and_sees_one_wrong_thing(recipient, donor):
    for change, holds in (
        (lambda b: None, True),
        (lambda b: flip_bit(b.cache.keys(0), (0, 0, 0, 0)), False),
        (lambda b: flip_bit(b.cache.values(2), (1, 1, len(b.cache) - 1, 31)), False),
        (lambda b: setattr(b.cache, "layers", 2), False),
        (lambda b: flip_bit(b.logits, (0, 5)), False),
        (lambda b: replace(b, logits=b.logits.to(torch.float64)), False),
        (lambda b: replace(b, logits=recipient.logits), False),  # shared with the recipient
        (lambda b: replace(b, cache=donor.cache), False),  # shared with the donor
        (lambda b: replace(b, cache=donor.cache.copy(len(donor.cache) + 1)), False),  # another stride
        (another_record, False),
        (lambda b: transplant(recipient, donor, tensors="k"), False),
        (lambda b: transplant(recipient, donor, layers=[0, 1]), False),
        (lambda b: recipient.replica(), False),
    ):
        made = transplant(recipient, donor)
        assert whole_transplant_holds(change(made) or made, recipient, donor) == holds


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tensors": "keys"}, ("tensors", "kv, k or v", "'keys'")),
        ({"tensors": ""}, ("tensors", "''")),
        ({"layers": [3]}, ("layers", "0 to 2", "3")),
        *(({"layers": [value]}, ("layers", str(value))) for value in (-1, True, 1.0)),
        ({"positions": [10_000]}, ("positions", "10000")),
        ({"heads": [2]}, ("heads", "0 to 1", "2")),
    ],
)
def test_places_that_do_not_exist_are_refused(recipient, donor, options, parts):
    with refused("transplant", *parts):
        transplant(recipient, donor, **options)


def test_another_prefix_record_or_geometry_is_refused(three, contract):
    tokens, recipient = list(three.live.state.tokens), three.prefill

    def held(layers, dtype):
        cache = KVCache((2, 2, len(tokens), 32), dtype, [torch.device("cpu")] * layers)
        for layer in range(layers):
            cache.append(layer, recipient.cache.keys(layer).to(dtype), recipient.cache.values(layer).to(dtype))
        return replace(three.incremental, cache=cache)

    other = build_prefill(three.model, State.from_tokens(contract, [tokens[0], tokens[1] + 1, *tokens[2:]]))
    for donor, parts in (
        (other, ("one prefix",)),
        (replace(three.incremental, cache=three.incremental.cache.copy(500)), ("layer 0 key", "stride")),
        (build_prefill(three.model, three.live.state, copies=1), ("layer 0 key", "shape")),
        (held(3, torch.float64), ("float64",)),
        (held(2, recipient.cache.keys(0).dtype), ("layer counts", "3", "2")),
    ):
        with refused(*parts):
            transplant(recipient, donor)
    with pytest.raises(RowFailure, match="one functional state"):
        transplant(recipient, another_record(three.incremental))


def test_a_donor_whose_copies_differ_fails_the_row(recipient, donor):
    flip_bit(donor.cache.keys(1), (1, 0, 4, 0))
    with pytest.raises(RowFailure, match="cache layer 1 key"):
        transplant(recipient, donor)
