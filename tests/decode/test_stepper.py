"""The functional record: an injective digest of what the decoder was shown, step by step."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import KVCache
from decode.stepper import FunctionalRecord, Stepper
from minimodel import Decoder
from minimodel.roles import VISIBILITY, attention_mask
from tests.conftest import Three
from tests.helpers import refused

Entry = tuple[int, int, int, list[bool]]
ENTRIES: list[Entry] = [(257, 0, 0, [True]), (10, 0, 1, [True, True]), (12, 4, 2, [True, False, True])]


def digest(entries: list[Entry]) -> str:
    record = FunctionalRecord()
    for token, role, position, visible in entries:
        record.add(token, role, position, torch.tensor(visible, dtype=torch.bool))
    assert record.length == len(entries)
    return record.sha256()


def test_each_part_of_each_entry_counts() -> None:
    changed = [
        [ENTRIES[0], (11, 0, 1, [True, True]), ENTRIES[2]],
        [ENTRIES[0], (10, 1, 1, [True, True]), ENTRIES[2]],
        [ENTRIES[0], (10, 0, 2, [True, True]), ENTRIES[2]],
        [ENTRIES[0], (10, 0, 1, [False, True]), ENTRIES[2]],
        [ENTRIES[1], ENTRIES[0], ENTRIES[2]],
        ENTRIES[:2],
        [],
    ]
    digests = {digest(entries) for entries in changed} | {digest(ENTRIES)}
    assert len(digests) == len(changed) + 1 and digest(ENTRIES) == digest(list(ENTRIES))


entries = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 20), st.lists(st.booleans(), max_size=3)),
    max_size=3,
)


@given(left=entries, right=entries)
def test_digests_are_equal_exactly_for_equal_entries(left: list[Entry], right: list[Entry]) -> None:
    assert (digest(left) == digest(right)) == (left == right)


def test_a_copy_goes_its_own_way() -> None:
    record = FunctionalRecord()
    record.add(1, 0, 0, torch.ones(1, dtype=torch.bool))
    before, other = record.sha256(), record.copy()
    other.add(2, 0, 1, torch.ones(2, dtype=torch.bool))
    assert record.sha256() == before != other.sha256() and (record.length, other.length) == (1, 2)


def test_every_construction_fills_the_record_that_its_tokens_call_for(three: Three) -> None:
    state = three.live.state
    digests = {boundary.record.sha256() for boundary in (three.live, three.incremental, three.prefill)}
    mask = attention_mask(torch.tensor([state.roles]), torch.tensor([state.roles]))[0, 0].tolist()
    rows = [(t, r, i, mask[i][: i + 1]) for i, (t, r) in enumerate(zip(state.tokens, state.roles))]
    assert digests == {digest(rows)}
    assert digests == {FunctionalRecord.of_state(state.tokens, state.roles, VISIBILITY).sha256()}
    assert digests != {FunctionalRecord.of_state(state.tokens, state.roles, ((1,) * 6,) * 6).sha256()}


def test_a_step_shows_the_decoder_its_mask_row_position_and_role(three: Three) -> None:
    """What a hand-written step passes gives the stepper's bits; another position, role or mask row gives others."""
    model, state, seen = three.model, three.live.state, three.incremental.cache
    last = len(state) - 1

    def step(position: int, role: int, hidden_slot: int | None) -> torch.Tensor:
        cache = KVCache.for_model(model, 2, len(state))
        for layer in range(cache.layers):
            cache.append(layer, seen.keys(layer)[:, :, :last], seen.values(layer)[:, :, :last])
        row = attention_mask(torch.tensor([state.roles[last:]]), torch.tensor([state.roles]))
        if hidden_slot is not None:
            row = row.clone()
            row[..., hidden_slot] = False
        with torch.inference_mode():
            return model(
                torch.tensor([[state.tokens[last]]] * 2),
                torch.tensor([[role]] * 2),
                torch.tensor([[position]] * 2),
                row.expand(2, 1, 1, -1),
                cache,
            )

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model.logits(hidden)[:, 0]

    assert torch.equal(logits(step(last, 4, None)), three.incremental.logits)
    for other in (step(last - 1, 4, None), step(last, 3, None), step(last, 4, 2)):
        assert not torch.equal(logits(other), three.incremental.logits)


def test_a_stepper_refuses_more_tokens_than_the_model_has_positions(bf16: Decoder) -> None:
    with refused("max_position_embeddings", "1024", "1025"):
        Stepper(bf16, KVCache.for_model(bf16, 2, 4), 2, 1025)
