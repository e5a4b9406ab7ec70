"""The functional record: an injective digest of what entered the decoder, taken from the tensors of each call."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import build_incremental, build_live, build_prefill
from decode import greedy_suffix
from decode.record import FunctionalRecord, derived_sha256
from minimodel.roles import VISIBILITY, attention_mask
from tests.helpers import PARTS, entering

ENTRIES = [(257, 0, 0, [True]), (10, 0, 1, [True, True]), (12, 4, 2, [True, False, True])]


def call(token, role, position, visible):
    """One call of one token, in two copies."""
    row = torch.tensor(visible, dtype=torch.bool).repeat(2, 1, 1, 1)
    return [*(torch.full((2, 1), value) for value in (token, role, position)), row]


def recorded(*calls):
    record = FunctionalRecord()
    for given_ in calls:
        record.enter(*given_)
    return record


def digest(entries):
    record = recorded(*(call(*entry) for entry in entries))
    assert record.length == len(entries) and record.synchronised
    return record.sha256()


def test_each_part_of_each_entry_counts():
    first, second, third = ENTRIES
    others = [(11, 0, 1, [True, True]), (10, 1, 1, [True, True]), (10, 0, 2, [True, True]), (10, 0, 1, [False, True])]
    changed = [[first, other, third] for other in others] + [[second, first, third], [first, second], []]
    assert len({digest(entries) for entries in [ENTRIES, *changed]}) == len(changed) + 1
    assert digest(ENTRIES) == digest(list(ENTRIES))


small = st.integers(0, 20)
entries = st.lists(
    st.tuples(small, st.integers(0, 5), small, st.lists(st.booleans(), min_size=1, max_size=3)), max_size=3
)


@given(left=entries, right=entries)
def test_digests_are_equal_exactly_for_equal_entries(left, right):
    assert (digest(left) == digest(right)) == (left == right)


@pytest.mark.parametrize("part", range(4))
def test_another_copy_given_anything_else_is_seen_whatever_the_first_was_given(part):
    calls = [call(*entry) for entry in ENTRIES]
    right = recorded(*calls)
    calls[1][part][1] = ~calls[1][part][1] if part == 3 else calls[1][part][1] + 1
    record = recorded(*calls)
    assert right.synchronised and not record.synchronised
    assert record.sha256() == right.sha256() and not record.copy().synchronised


def test_a_copy_goes_on_alone():
    record = recorded(*(call(*entry) for entry in ENTRIES))
    other = record.copy()
    other.enter(*call(*ENTRIES[1]))
    assert record.sha256() == digest(ENTRIES) != other.sha256() and (record.length, other.length) == (3, 4)


def test_one_call_of_many_tokens_is_their_calls_one_by_one():
    """A row that sees a later slot is none of them."""
    length = 131
    tokens, roles = torch.arange(length).expand(2, -1), torch.zeros(2, length, dtype=torch.int64)
    mask = attention_mask(roles, roles)
    one, parts = recorded((tokens, roles, tokens, mask)), [slice(slot, slot + 1) for slot in range(length)]
    many = recorded(*((tokens[:, p], roles[:, p], tokens[:, p], mask[:, :, p, : p.stop]) for p in parts))
    assert one.sha256() == many.sha256() and one.length == many.length == length
    seeing = mask.clone()
    seeing[:, :, 3, 4] = True
    assert recorded((tokens, roles, tokens, seeing)).sha256() != one.sha256()


def test_no_mask_is_the_plain_causal_one_and_no_role_is_not_role_0():
    tokens, mask = torch.tensor([[5, 6, 7]]), torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    histories = (None, None), (None, mask), (torch.zeros_like(tokens), mask)
    digests = [recorded((tokens, roles, tokens, rows)).sha256() for roles, rows in histories]
    assert digests[0] == digests[1] != digests[2]


def test_every_construction_fills_the_record_that_its_tokens_call_for(three, contract):
    state = three.live.state
    digests = {boundary.record.sha256() for boundary in (three.live, three.incremental, three.prefill)}
    mask = attention_mask(torch.tensor([state.roles]), torch.tensor([state.roles]))[0, 0].tolist()
    rows = [(t, r, i, mask[i][: i + 1]) for i, (t, r) in enumerate(zip(state.tokens, state.roles))]
    assert digests == {digest(rows)} == {derived_sha256(contract, state.tokens)}
    assert digests == {FunctionalRecord.of_state(state.tokens, state.roles, VISIBILITY).sha256()}
    assert digests != {FunctionalRecord.of_state(state.tokens, state.roles, ((1,) * 6,) * 6).sha256()}
    assert derived_sha256(contract, [*state.tokens, contract.open_ids[0]]) is None, "not allowed by the contract"


BUILDS = {
    "live": lambda model, prompt, state: build_live(model, prompt),
    "incremental": lambda model, prompt, state: build_incremental(model, state),
    "prefill": lambda model, prompt, state: build_prefill(model, state),
    "chunks": lambda model, prompt, state: build_prefill(model, state, chunk=7),
}


@pytest.fixture(scope="module")
def state(bf16, prompt):
    return build_live(bf16, prompt).state


@pytest.mark.parametrize("name", BUILDS)
def test_a_fault_at_the_decoders_entry_is_in_the_record(bf16, prompt, state, contract, name):
    """The same in both copies, so that nothing else notices."""
    right = BUILDS[name](bf16, prompt, state)
    assert right.record.sha256() == derived_sha256(contract, right.state.tokens)
    for part in PARTS:
        with entering(bf16, part, slot=20):
            faulty = BUILDS[name](bf16, prompt, state)
        assert faulty.record.sha256() != derived_sha256(contract, faulty.state.tokens), part
        assert faulty.record.synchronised, part


def test_a_fault_in_a_suffix_is_in_its_record(three, contract):
    def holds():
        suffix = greedy_suffix(three.model, three.live)
        return suffix.functional_sha256 == derived_sha256(contract, (*three.live.state.tokens, *suffix.tokens))

    assert holds()
    for part in PARTS:
        with entering(three.model, part, slot=len(three.live.state) + 3):
            assert not holds(), part
