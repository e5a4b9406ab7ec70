"""The decoder: against the float64 reference, stock and adapted, its masks and its gradients."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import KVCache
from minimodel import Decoder, load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import same_bits
from minimodel.layers import RotaryTables
from minimodel.roles import attention_mask
from tests.conftest import numeric
from tests.helpers import refused
from tests.minimodel.float64_decoder import reference
from tests.minimodel.forward import ROLES, TOKENS, call
from tests.tiny import write_checkpoint


@pytest.mark.parametrize("attention_kernel", sorted(ATTENTION_KERNELS))
@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4), ("bf16", 0.3)])
def test_decoder_against_the_float64_reference(tiny_directory, attention_kernel, dtype, bound):
    model = load_model(tiny_directory, numeric(dtype, attention=attention_kernel), copies=1)
    cache = KVCache.for_model(model, 1, 16)
    hidden = call(model, cache)
    exact_hidden, exact_logits, held = reference(tiny_directory, ROLES)
    assert hidden.shape == (1, len(TOKENS), 128) and len(cache) == len(TOKENS)
    assert np.abs(hidden[0].double().numpy() - exact_hidden).max() < bound
    assert np.abs(model.logits(hidden)[0].double().numpy() - exact_logits).max() < bound * 4
    for layer, (k, v) in enumerate(held):
        assert np.abs(cache.keys(layer)[0].double().numpy() - k).max() < bound
        assert np.abs(cache.values(layer)[0].double().numpy() - v).max() < bound
    if dtype != "bf16":  # the controls: one role, one position, one token, one mask entry
        roles, positions, tokens = torch.tensor([ROLES]), torch.arange(len(TOKENS))[None], torch.tensor([TOKENS])
        roles[0, 2], positions[0, 2], tokens[0, 2] = 4, 4, 201
        mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
        mask[0, 0, 5, 4] = True
        for change in ({"roles": roles}, {"position_ids": positions}, {"input_ids": tokens}, {"mask": mask}):
            assert np.abs(call(model, **change)[0].double().numpy() - exact_hidden).max() > 10 * bound, change


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4)])
def test_a_stock_checkpoint_runs_as_plain_qwen(stock_directory, dtype, bound):
    model = load_model(stock_directory, numeric(dtype), copies=1)
    exact = reference(stock_directory, None)[0]
    assert np.abs(call(model, roles=None, mask=None)[0].double().numpy() - exact).max() < bound
    hidden_by_roles = call(model, roles=None)[0].double().numpy()
    assert np.abs(hidden_by_roles - exact).max() > 10 * bound, "the multi-branch mask is not the causal one"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_stock_bits_are_those_of_a_zero_role_table(tmp_path, stock_directory, dtype):
    zero = write_checkpoint(tmp_path / "zero")
    save_file({"weight": torch.zeros(14, 128, dtype=torch.bfloat16)}, zero / "role_embedding.safetensors")
    stock, adapted = (load_model(directory, numeric(dtype)) for directory in (stock_directory, zero))
    assert stock.role_embedding is None
    assert same_bits(call(stock, roles=None, mask=None), call(adapted, mask=None))
    save_file({"weight": torch.ones(14, 128, dtype=torch.bfloat16)}, zero / "role_embedding.safetensors")
    assert not same_bits(call(stock, roles=None, mask=None), call(load_model(zero, numeric(dtype)), mask=None))


def test_roles_go_with_a_role_table_and_only_with_one(bf16, stock_directory):
    with refused("roles", "a role table"):
        call(bf16, roles=None)
    with refused("roles", "no role table"):
        call(load_model(stock_directory, numeric("bf16")))


def test_raw_role_r_reads_row_offset_plus_r(bf16, tmp_path):
    assert bf16.role_embedding is not None
    embedded = bf16.embed(torch.tensor([TOKENS]), torch.tensor([ROLES]))
    rows = bf16.role_embedding[[8 + role for role in ROLES]]
    assert same_bits(embedded[0], bf16.embed_tokens[TOKENS] + rows)
    shifted = load_model(write_checkpoint(tmp_path / "shifted", contract={"role_offset": 7}), numeric("bf16"))
    assert not same_bits(shifted.embed(torch.tensor([TOKENS]), torch.tensor([ROLES])), embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_bool_is_refused(bf16, dtype):
    """pytorch/pytorch 103963 (case 5)."""
    mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
    with refused("mask dtype", "torch.bool", str(dtype)):
        call(bf16, mask=mask.to(dtype))
    with refused("mask shape"):
        call(bf16, mask=mask[..., :-1])


def test_no_mask_is_causal_over_the_cache_too(stock_directory):
    model = load_model(stock_directory, numeric("fp32"))
    cache = KVCache.for_model(model, 1, 10)
    tokens, positions = torch.tensor([TOKENS]), torch.arange(len(TOKENS))[None]
    with torch.inference_mode():
        parts = [
            model(tokens[:, p], None, positions[:, p], None, cache) for p in (slice(0, 4), slice(4, 9), slice(9, 10))
        ]
    assert (torch.cat(parts, dim=1) - call(model, roles=None, mask=None)).abs().max() < 1e-4


def test_parameters_that_require_gradients_train(tiny_directory):
    weights = load_file(tiny_directory / "model.safetensors")
    table = load_file(tiny_directory / "role_embedding.safetensors")["weight"]
    named = {**weights, "role_embedding.weight": table}
    parameters = {name: tensor.float().requires_grad_() for name, tensor in named.items()}
    model = load_model(tiny_directory, numeric("fp32"))
    model = Decoder(model.config, parameters, model.numeric, model.rules)
    roles = torch.tensor([ROLES])
    hidden = model(torch.tensor([TOKENS]), roles, torch.arange(len(TOKENS))[None], attention_mask(roles, roles))
    model.logits(hidden).logsumexp(-1).sum().backward()
    still = [
        name for name, tensor in parameters.items() if tensor.grad is None or not bool(tensor.grad.abs().sum() > 0)
    ]
    assert still == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("input_ids", 288, "0 to 287"),
        ("input_ids", -1, "0 to 287"),
        ("roles", 6, "0 to 5"),
        ("roles", -1, "0 to 5"),
        ("position_ids", -1, "0 to 1023"),
        ("position_ids", 1024, "0 to 1023"),
    ],
)
def test_ids_out_of_range_are_refused_by_name(bf16, name, value, expected):
    """-1 would read the last row of a table, and role 6 a row behind the answer's where the table has one."""
    given = {"input_ids": [list(TOKENS)], "roles": [list(ROLES)], "position_ids": [list(range(len(TOKENS)))]}
    bf16(*(torch.tensor(ids) for ids in given.values()), None)
    given[name][0][2] = value
    with refused(f"{name}: expected integers from {expected}, found {value}"):
        bf16(*(torch.tensor(ids) for ids in given.values()), None)


def test_a_position_beyond_the_keys_takes_its_own_row_of_the_rotary_table(bf16):
    """A first table has 512 rows: position 900 of a short call needs more, and gets the bits of a longer table."""
    tokens, roles = torch.tensor([TOKENS]), torch.tensor([ROLES])
    far = torch.arange(900, 900 + len(TOKENS))[None]
    fresh = with_new_tables(bf16)
    first = fresh(tokens, roles, far, None)
    fresh.rotary.at(torch.tensor([[0]]), 1024)
    assert same_bits(first, fresh(tokens, roles, far, None))
    assert not same_bits(first, fresh(tokens, roles, far - 900 + 1, None))


def with_new_tables(model: Decoder) -> Decoder:
    """The same weights with a rotary table that no call has grown yet."""
    again = copy.copy(model)
    config = model.config
    again.rotary = RotaryTables(config.head_dim, config.rope_theta, torch.bfloat16, torch.device("cpu"))
    return again
