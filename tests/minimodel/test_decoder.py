"""The decoder: against the float64 reference, stock and adapted, its masks, padding, observed steps and gradients."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import KVCache
from minimodel import Decoder, load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import same_bits
from minimodel.layers import RotaryEmbedding
from minimodel.roles import attention_mask, position_ids
from tests.conftest import numeric
from tests.helpers import refused
from tests.minimodel.float64_decoder import HEAD_DIM, KV_HEADS, LAYERS, ROLES, TOKENS, reference
from tests.tiny import write_checkpoint

every_attention = pytest.mark.parametrize("attention", sorted(ATTENTION_KERNELS))


def call(model, cache=None, observe=None, **changes):
    """One forward call over TOKENS, in the model's own visibility."""
    roles = torch.tensor([ROLES])
    inputs = {
        "input_ids": torch.tensor([TOKENS]),
        "roles": roles,
        "position_ids": torch.arange(len(TOKENS))[None],
        "mask": attention_mask(roles, roles),
        **changes,
    }
    with torch.inference_mode():
        return model(**inputs, cache=cache, observe=observe)


def distance(tensor, exact):
    return np.abs(tensor[0].double().numpy() - exact).max()


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4), ("bf16", 0.3)])
@every_attention
def test_decoder_against_the_float64_reference(tiny_directory, attention, dtype, bound):
    model = load_model(tiny_directory, numeric(dtype, attention=attention), copies=1)
    cache = KVCache.for_model(model, 1, 16)
    hidden = call(model, cache)
    exact_hidden, exact_logits, held = reference(tiny_directory, ROLES)
    assert hidden.shape == (1, len(TOKENS), 128) and len(cache) == len(TOKENS)
    assert distance(hidden, exact_hidden) < bound and distance(model.logits(hidden), exact_logits) < bound * 4
    for layer, (k, v) in enumerate(held):
        assert distance(cache.keys(layer), k) < bound and distance(cache.values(layer), v) < bound
    if dtype != "bf16":  # the controls: one role, one position, one token, one mask entry
        roles, positions, tokens = torch.tensor([ROLES]), torch.arange(len(TOKENS))[None], torch.tensor([TOKENS])
        roles[0, 2], positions[0, 2], tokens[0, 2] = 4, 4, 201
        mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
        mask[0, 0, 5, 4] = True
        for change in ({"roles": roles}, {"position_ids": positions}, {"input_ids": tokens}, {"mask": mask}):
            assert distance(call(model, **change), exact_hidden) > 10 * bound, change


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4)])
def test_a_stock_checkpoint_runs_as_plain_qwen_causal_over_the_cache_too(stock_directory, dtype, bound):
    model = load_model(stock_directory, numeric(dtype), copies=1)
    exact = reference(stock_directory, None)[0]
    assert distance(call(model, roles=None, mask=None), exact) < bound
    assert distance(call(model, roles=None), exact) > 10 * bound, "the multi-branch mask is not the causal one"
    cache, tokens, positions = KVCache.for_model(model, 1, 10), torch.tensor([TOKENS]), torch.arange(10)[None]
    with torch.inference_mode():
        parts = [model(tokens[:, p], None, positions[:, p], None, cache) for p in map(slice, (0, 4, 9), (4, 9, 10))]
    assert distance(torch.cat(parts, dim=1), exact) < bound


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_stock_bits_are_those_of_a_zero_role_table(directory, stock_directory, dtype):
    stock = load_model(stock_directory, numeric(dtype))
    expected = call(stock, roles=None, mask=None)
    for value in (0, 1):
        table = torch.full((14, 128), value, dtype=torch.bfloat16)
        save_file({"weight": table}, directory / "role_embedding.safetensors")
        assert same_bits(expected, call(load_model(directory, numeric(dtype)), mask=None)) == (value == 0)


def test_roles_go_with_a_role_table_and_only_with_one(bf16, stock_directory):
    with refused("roles", "a role table"):
        call(bf16, roles=None)
    with refused("roles", "no role table"):
        call(load_model(stock_directory, numeric("bf16")))


def test_raw_role_r_reads_row_offset_plus_r(bf16, tmp_path):
    given = torch.tensor([TOKENS]), torch.tensor([ROLES])
    embedded = bf16.embed(*given)
    assert same_bits(embedded[0], bf16.embed_tokens[TOKENS] + bf16.role_embedding[[8 + role for role in ROLES]])
    shifted = load_model(write_checkpoint(tmp_path / "shifted", contract={"role_offset": 7}), numeric("bf16"))
    assert not same_bits(shifted.embed(*given), embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_bool_is_refused(bf16, dtype):
    """pytorch/pytorch 103963 (case 5)."""
    mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
    with refused("mask dtype", "torch.bool", str(dtype)):
        call(bf16, mask=mask.to(dtype))
    with refused("mask shape"):
        call(bf16, mask=mask[..., :-1])


def test_parameters_that_require_gradients_train(tiny_directory, fp32):
    named = load_file(tiny_directory / "model.safetensors")
    named["role_embedding.weight"] = load_file(tiny_directory / "role_embedding.safetensors")["weight"]
    parameters = {name: tensor.float().requires_grad_() for name, tensor in named.items()}
    model, roles = Decoder(fp32.config, parameters, fp32.numeric, fp32.rules), torch.tensor([ROLES])
    hidden = model(torch.tensor([TOKENS]), roles, torch.arange(len(TOKENS))[None], attention_mask(roles, roles))
    model.logits(hidden).logsumexp(-1).sum().backward()
    assert [name for name, tensor in parameters.items() if tensor.grad is None or not tensor.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("input_ids", value, "0 to 287") for value in (288, -1)),
        *(("roles", value, "0 to 5") for value in (6, -1)),
        *(("position_ids", value, "0 to 1023") for value in (-1, 1024)),
    ],
)
def test_ids_out_of_range_are_refused_by_name(bf16, name, value, expected):
    """-1 would read the last row of a table, and role 6 a row behind the answer's where the table has one."""
    given = {"input_ids": [list(TOKENS)], "roles": [list(ROLES)], "position_ids": [list(range(len(TOKENS)))]}
    given[name][0][2] = value
    with refused(f"{name}: expected integers from {expected}, found {value}"):
        call(bf16, **{key: torch.tensor(ids) for key, ids in given.items()}, mask=None)


@pytest.mark.parametrize("name", ["roles", "position_ids"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 10), (10,), (1, 9)])
def test_roles_and_positions_of_another_shape_are_refused(bf16, name, shape):
    """A single column would be taken for every token: other numbers, and no error."""
    with refused(f"{name} shape: expected [1, {len(TOKENS)}], found {list(shape)}"):
        call(bf16, **{name: torch.zeros(shape, dtype=torch.int64)})


def test_a_position_beyond_the_keys_takes_its_own_row_of_the_rotary_table(bf16):
    """A first table has 512 rows: position 900 of a short call needs more, and gets the bits of a longer table."""
    far, fresh = torch.arange(900, 900 + len(TOKENS))[None], copy.copy(bf16)
    fresh.rotary_emb = RotaryEmbedding(
        bf16.config.head_dim, bf16.config.rope_theta, torch.bfloat16, torch.device("cpu")
    )
    first = call(fresh, position_ids=far)
    fresh.rotary_emb(torch.tensor([[0]]), 1024)
    assert same_bits(first, call(fresh, position_ids=far))
    assert not same_bits(first, call(fresh, position_ids=far - 900 + 1))


ATTENTION = ("q_proj", "k_proj", "v_proj", "q_rotary", "k_rotary", "attention", "o_proj")
STEPS = ["input_layernorm", *(f"self_attn.{step}" for step in ATTENTION), "attention_residual"]
STEPS += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.product", "mlp.down_proj", "mlp_residual"]


def test_observed_steps_are_complete_in_order_and_leave_the_bits_alone(bf16):
    plain, seen = call(bf16), []

    def observe(name, tensor):
        seen.append((name, tensor.clone()))

    hidden = call(bf16, observe=observe)
    with torch.inference_mode():
        logits = bf16.logits(hidden, observe)
    inner = [f"layers.{i}.{step}" for i in range(LAYERS) for step in STEPS]
    assert [name for name, _ in seen] == ["embed", *inner, "norm", "logits"]
    steps = dict(seen)
    assert same_bits(hidden, plain) and same_bits(logits, bf16.logits(plain))
    assert same_bits(steps["norm"], hidden) and same_bits(steps["logits"], logits)
    assert all(tensor.dtype == torch.bfloat16 for tensor in steps.values())
    before = steps["embed"]  # each residual step is the sum of what went into it
    for at in (f"layers.{layer}." for layer in range(LAYERS)):
        assert same_bits(steps[at + "attention_residual"], before + steps[at + "self_attn.o_proj"])
        assert same_bits(steps[at + "mlp_residual"], steps[at + "attention_residual"] + steps[at + "mlp.down_proj"])
        before = steps[at + "mlp_residual"]
    rotated, projected = steps["layers.0.self_attn.q_rotary"], steps["layers.0.self_attn.q_proj"].view(1, 10, 4, 32)
    assert same_bits(rotated[:, :, 0], projected[:, 0]) and not same_bits(rotated[:, :, 1], projected[:, 1])


def padded_call(model, fill):
    """Rows of 3 and 8 tokens, the short one left-padded with `fill`: hidden states, cache, and the steps observed."""
    tokens = torch.tensor([[fill] * 5 + TOKENS[:3], TOKENS[:8]])
    roles = torch.tensor([[0] * 5 + ROLES[:3], ROLES[:8]])
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :5] = False
    steps, cache = {}, KVCache.for_model(model, 2, 8)
    with torch.inference_mode():
        mask = attention_mask(roles, roles, valid, valid)
        hidden = model(tokens, roles, position_ids(valid), mask, cache, lambda n, t: steps.update({n: t.clone()}))
    return hidden, cache, steps


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@every_attention
def test_padding_leaves_no_nan_and_does_not_reach_valid_rows(tiny_directory, attention, dtype):
    """pytorch/pytorch 103749 (case 4)."""
    model = load_model(tiny_directory, numeric(dtype, attention=attention))
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
    keys, short, roles = cache.keys(0), KVCache.for_model(fp32, 1, 3), torch.tensor([ROLES[:3]])
    assert torch.equal(keys[0, :, 5], projected[0, :, 5]), "position 0 rotates by nothing"
    assert not torch.equal(keys[0, :, 6], projected[0, :, 6])
    with torch.inference_mode():
        fp32(torch.tensor([TOKENS[:3]]), roles, torch.arange(3)[None], attention_mask(roles, roles), short)
    assert (keys[:1, :, 5:] - short.keys(0)).abs().max() < 1e-5
