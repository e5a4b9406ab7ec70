"""Left padding: it leaves no NaN, reaches no valid row, and the first valid key stands at position zero."""

import pytest
import torch

from cache import KVCache
from minimodel import Decoder, load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import same_bits
from minimodel.roles import attention_mask, position_ids
from tests.conftest import numeric
from tests.minimodel.forward import HEAD_DIM, KV_HEADS, ROLES, TOKENS


def padded_call(model: Decoder, fill: int) -> tuple[torch.Tensor, KVCache, dict[str, torch.Tensor]]:
    """Rows of 3 and 8 tokens, the short one left-padded with `fill`."""
    tokens = torch.tensor([[fill] * 5 + TOKENS[:3], TOKENS[:8]])
    roles = torch.tensor([[0] * 5 + ROLES[:3], ROLES[:8]])
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :5] = False
    steps: dict[str, torch.Tensor] = {}
    cache = KVCache.for_model(model, 2, 8)
    with torch.inference_mode():
        mask = attention_mask(roles, roles, valid, valid)
        hidden = model(tokens, roles, position_ids(valid), mask, cache, lambda n, t: steps.update({n: t.clone()}))
    return hidden, cache, steps


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("attention_kernel", sorted(ATTENTION_KERNELS))
def test_padding_leaves_no_nan_and_does_not_reach_valid_rows(tiny_directory, attention_kernel, dtype):
    """pytorch/pytorch 103749 (case 4)."""
    model = load_model(tiny_directory, numeric(dtype, attention=attention_kernel))
    (hidden, cache, _), (other_hidden, other, _) = padded_call(model, 3), padded_call(model, 77)
    for (_, name, mine), (_, _, theirs) in zip(cache.tensors(), other.tensors()):
        assert mine.isfinite().all() and theirs.isfinite().all(), name
        assert same_bits(mine[0, :, 5:], theirs[0, :, 5:]) and same_bits(mine[1], theirs[1])
        assert not same_bits(mine[0, :, :5], theirs[0, :, :5]), "the control: the fill does reach its own slots"
    assert same_bits(hidden[0, 5:], other_hidden[0, 5:]) and same_bits(hidden[1], other_hidden[1])


def test_the_first_valid_key_of_a_left_padded_row_stands_at_position_zero(fp32):
    """unslothai/unsloth 3795 (case 6): RoPE is relative, so logits hide a shift that the first K row shows."""
    _, cache, steps = padded_call(fp32, 3)
    projected = steps["layers.0.self_attn.k_proj"].view(2, 8, KV_HEADS, HEAD_DIM).transpose(1, 2)
    keys = cache.keys(0)
    assert torch.equal(keys[0, :, 5], projected[0, :, 5]), "position 0 rotates by nothing"
    assert not torch.equal(keys[0, :, 6], projected[0, :, 6])
    short = KVCache.for_model(fp32, 1, 3)
    roles = torch.tensor([ROLES[:3]])
    with torch.inference_mode():
        fp32(torch.tensor([TOKENS[:3]]), roles, torch.arange(3)[None], attention_mask(roles, roles), short)
    assert (keys[:1, :, 5:] - short.keys(0)).abs().max() < 1e-5
