"""The ladder's lower rungs, bit for bit: RoPE table, RMSNorm, one attention, one decoder layer.

Our side is read through `observe`, so that the tested arithmetic is the running decoder's own.
"""

from functools import cache

import pytest
import torch

from cache.kv import KVCache
from minimodel.bits import same_bits
from minimodel.layers import rms_norm, rotary_table
from minimodel.load import load_model
from tests.hf import versions
from tests.hf.conftest import numeric
from tests.hf.runs import calls

POSITIONS = 40_000  # beyond Qwen2.5's 32,768


@torch.inference_mode()
def test_rope_table(ours, theirs):
    dtype, config = theirs.dtype, ours.config
    positions = torch.arange(POSITIONS)[None]
    cos, sin = theirs.model.model.rotary_emb(torch.empty(0, dtype=dtype), positions)
    mine = rotary_table(POSITIONS, config.head_dim, config.rope_theta, dtype)
    assert same_bits(mine[0], cos[0]) and same_bits(mine[1], sin[0])
    # controls: another base, positions one off, angles computed in the model dtype
    base = rotary_table(POSITIONS, config.head_dim, 10_000.0, dtype)
    assert not same_bits(base[0], cos[0]) and not same_bits(base[1], sin[0])
    assert not same_bits(mine[0][1:], cos[0, :-1])
    narrow = positions[0].to(torch.bfloat16).float()[:, None] * theirs.model.model.rotary_emb.inv_freq.float()
    assert not same_bits(torch.cat((narrow, narrow), dim=-1).cos().to(dtype), cos[0])


@torch.inference_mode()
def test_rms_norm(ours, theirs):
    module, dtype = theirs.model.model.layers[1].input_layernorm, theirs.dtype
    eps, weight = ours.config.rms_norm_eps, ours.layers[1].input_layernorm
    assert len(set(weight.tolist())) > 50, "the weight must be random for the order of the product to matter"
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 50, ours.config.hidden_size, generator=generator) * 3).to(dtype)
    expected = module(x)
    assert same_bits(rms_norm(x, weight, eps), expected)
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if dtype == torch.bfloat16:  # control: the weight product before the cast; in FP32 there is no cast to be before
        assert not same_bits((weight.float() * (wide * scale)).to(dtype), expected)
    # control: the weight joined to the input first
    assert not same_bits(((weight.float() * wide) * scale).to(dtype), expected)
    assert not same_bits(rms_norm(x, weight, 10 * eps), expected)


@pytest.fixture(scope="module")
def steps(directory, dtype, asked):
    """What our decoder sees at every named step, one dict per call; each kernel and construction computed once."""

    @cache
    @torch.inference_mode()
    def observed(kernel, construction):
        model = load_model(directory, numeric(dtype, kernel))
        held, seen = KVCache.for_model(model, 2, asked.length), []
        for start, stop in calls(asked.length, construction):
            seen.append({})
            model(*asked.call(start, stop), held, lambda name, tensor, now=seen[-1]: now.update({name: tensor.clone()}))
        return seen

    return observed


@torch.inference_mode()
def module_outputs(theirs, which, inputs, request, construction):
    """Layer 0 of transformers, or its attention alone, over the same inputs with a new DynamicCache."""
    layer = theirs.model.model.layers[0]
    module = layer if which == "block" else layer.self_attn
    held, outputs = versions.new_cache(), []
    for hidden_states, (start, stop) in zip(inputs, calls(request.length, construction)):
        _, _, positions, mask = request.call(start, stop)
        given = {
            "hidden_states": hidden_states,
            "position_embeddings": theirs.model.model.rotary_emb(hidden_states, positions),
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": True,
            versions.cache_argument(type(module).forward): held,
        }
        outputs.append(versions.first_output(module(**given)))
    return outputs


RUNGS = {
    "attention": ("layers.0.input_layernorm", "layers.0.self_attn.o_proj"),
    "block": ("embed", "layers.0.mlp_residual"),
}


@pytest.mark.parametrize("construction", ["prefill", "incremental"])
@pytest.mark.parametrize("rung", list(RUNGS))
def test_attention_and_block(rung, construction, steps, theirs, asked):
    before, after = RUNGS[rung]
    mine = steps(versions.matching_kernel(), construction)
    expected = module_outputs(theirs, rung, [step[before] for step in mine], asked, construction)
    assert all(same_bits(step[after], out) for step, out in zip(mine, expected))
    others = steps("eager", construction)  # the control: it rounds after each of its steps, on every machine
    assert all(same_bits(step[before], other[before]) for step, other in zip(mine, others)), "same inputs"
    assert not all(same_bits(other[after], out) for other, out in zip(others, expected))
