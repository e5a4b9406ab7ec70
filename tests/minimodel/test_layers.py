"""RMSNorm, rotary tables and rotation, SiLU: values, rounding order, and each fast form against its specification."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minimodel.bits import bits, same_bits
from minimodel.layers import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
    rms_norm,
    rms_norm_literal,
    rotary_table,
    silu_in_steps,
)
from tests.helpers import DTYPES, random_tensor

NARROW, CPU = DTYPES[:2], torch.device("cpu")


def test_rotary_table_against_the_formula_in_float64():
    angles = [[p / 1e6 ** (2 * (i % 8) / 16) for i in range(16)] for p in range(300)]
    cos, sin = rotary_table(300, 16, 1e6, torch.float64)
    for mine, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        np.testing.assert_allclose(mine.numpy(), exact, rtol=0, atol=1e-12)
    assert not torch.allclose(cos, rotary_table(300, 16, 1e4, torch.float64)[0]), "the control: another base"


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_rotary_tables_are_fp32_tables_rounded_once(dtype):
    narrow, wide = rotary_table(6000, 64, 1e6, dtype), rotary_table(6000, 64, 1e6, torch.float32)
    assert all(same_bits(n, w.to(dtype)) for n, w in zip(narrow, wide))
    # the control: position 5,001 does not exist in a narrow dtype, so its angle there would be another's
    rounded = torch.tensor(5001.0).to(dtype).item()
    assert abs(narrow[0][5001, 0].item() - math.cos(5001)) < 2**-8 < abs(math.cos(rounded) - math.cos(5001))


def test_rows_follow_position_ids_and_do_not_depend_on_growth():
    ids = torch.tensor([[0, 3, 3, 511], [7, 0, 1, 2]])
    small, grown = (RotaryEmbedding(32, 1e6, torch.bfloat16, CPU) for _ in range(2))
    cos, sin = rotary_table(8192, 32, 1e6, torch.bfloat16)
    assert same_bits(grown(torch.tensor([[4999]]), 5000)[0][0, 0, 0], cos[4999])
    for mine, other, table in zip(small(ids, 512), grown(ids, 512), (cos, sin)):
        assert mine.shape == (2, 4, 1, 32)
        assert same_bits(mine, other) and same_bits(mine[:, :, 0], table[ids])
        assert not same_bits(mine[0, 0], mine[0, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_turns_pairs_half_a_head_apart_and_rounds_both_products(dtype):
    for head_dim in (2, 6, 64):
        cos, sin = (table[None, None, 5:12] for table in rotary_table(12, head_dim, 1e6, dtype))
        x, half = random_tensor(2, 3, 7, head_dim, dtype=dtype, seed=head_dim), head_dim // 2
        first, second = x[..., :half], x[..., half:]
        c, s = cos[..., :half], sin[..., :half]
        turned = torch.cat((first * c + -(second * s), second * c + first * s), dim=-1)
        assert same_bits(apply_rotary_pos_emb(x, cos, sin), turned)
        assert not same_bits(apply_rotary_pos_emb(x, cos, -sin), turned), "the control: the other way round"


def test_tables_first_used_in_inference_mode_still_train():
    tables, ids = RotaryEmbedding(8, 1e4, torch.float32, CPU), torch.tensor([[0, 1, 2]])
    with torch.inference_mode():
        tables(ids, 3)
    x = random_tensor(1, 3, 2, 8).requires_grad_()
    apply_rotary_pos_emb(x, *tables(ids, 3)).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_the_norms_weight_multiplies_the_value_rounded_to_the_model_dtype():
    """transformers Qwen2RMSNorm: statistics in FP32, rounded to BF16, and only then the product."""
    x, weight = random_tensor(4, 50, 256, dtype=torch.bfloat16), 1 + random_tensor(256, dtype=torch.bfloat16, seed=1)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    found = rms_norm(x, weight, 1e-6)
    assert same_bits(found, weight * normalised.to(torch.bfloat16))
    assert not same_bits(found, (weight.float() * normalised).to(torch.bfloat16)), "the product in FP32"
    assert not same_bits(found, weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))), "all in BF16"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_its_single_steps(dtype):
    moved, seed = 0, 0
    for width in (8, 36, 64, 100, 256, 896, 1537):
        for rows, scale in (((1, 1), 0.01), ((2, 1), 1), ((1, 7), 40), ((3, 31), 1)):
            x, weight = (random_tensor(*shape, dtype=dtype, seed=seed) for shape in ((*rows, width), (width,)))
            x, seed = x * scale, seed + 1
            literal = rms_norm_literal(x, weight, 1e-6)
            assert same_bits(rms_norm(x, weight, 1e-6), literal), (rows, width)
            moved += not same_bits(F.rms_norm(x, (width,), weight, 1e-6), literal)
    assert moved > 0 or dtype.itemsize >= 4, "torch's norm with a weight rounds in another order"


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_silu_is_one_function_of_every_number(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    in_vectors, left_over = F.silu(x), F.silu(x.view(-1, 1)[:, [0, 0]][:, :1])  # strided: one number at a time
    assert same_bits(in_vectors, left_over.flatten()) and same_bits(silu_in_steps(x), in_vectors)


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_wide_silu_depends_on_the_place_and_the_steps_do_not(dtype):
    x = random_tensor(20_000, dtype=dtype) * 3
    for function, moves in ((F.silu, True), (silu_in_steps, False)):
        alone = torch.cat([function(x[i : i + 1]) for i in range(2000)])
        assert bool((bits(function(x)[:2000]) != bits(alone)).any()) == moves
    torch.testing.assert_close(silu_in_steps(x), F.silu(x))
