"""A hand-written step has the stepper's bits, and a stepper keeps to the model's positions."""

import torch

from cache import KVCache
from decode.stepper import Stepper
from minimodel.roles import attention_mask
from tests.helpers import refused


def test_a_step_shows_the_decoder_its_mask_row_position_and_role(three):
    """What a hand-written step passes gives the stepper's bits; another position, role or mask row gives others."""
    model, state, seen = three.model, three.live.state, three.incremental.cache
    last = len(state) - 1

    def step(position, role, hidden_slot):
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

    def logits(hidden):
        with torch.inference_mode():
            return model.logits(hidden)[:, 0]

    assert torch.equal(logits(step(last, 4, None)), three.incremental.logits)
    for other in (step(last - 1, 4, None), step(last, 3, None), step(last, 4, 2)):
        assert not torch.equal(logits(other), three.incremental.logits)


def test_a_stepper_refuses_more_tokens_than_the_model_has_positions(bf16):
    with refused("max_position_embeddings", "1024", "1025"):
        Stepper(bf16, KVCache.for_model(bf16, 2, 4), 2, 1025)
