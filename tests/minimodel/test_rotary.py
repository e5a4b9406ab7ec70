"""Rotary tables: FP32 angles, the cast last, rows by position id."""

import math

import numpy as np
import pytest
import torch

from minimodel.bits import same_bits
from minimodel.layers import RotaryTables, rotary_table, rotate, rotate_half, sign_first_half
from tests.helpers import random_tensor

CPU = torch.device("cpu")


def exact_table(length: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    angles = np.array(
        [[p / theta ** (2 * (i % (head_dim // 2)) / head_dim) for i in range(head_dim)] for p in range(length)]
    )
    return np.cos(angles), np.sin(angles)


def test_table_against_the_formula_in_float64():
    for mine, exact in zip(rotary_table(300, 16, 1e6, torch.float64), exact_table(300, 16, 1e6)):
        np.testing.assert_allclose(mine.numpy(), exact, rtol=0, atol=1e-12)


def test_table_of_another_base_is_another_table():
    assert not torch.allclose(
        rotary_table(300, 16, 1e6, torch.float64)[0], rotary_table(300, 16, 1e4, torch.float64)[0]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tables_are_fp32_tables_rounded_once(dtype):
    narrow, wide = rotary_table(6000, 64, 1e6, dtype), rotary_table(6000, 64, 1e6, torch.float32)
    assert all(same_bits(n, w.to(dtype)) for n, w in zip(narrow, wide))


def test_angles_in_bf16_would_be_wrong():
    """The control of the line above: position 5,000 does not exist in BF16, so its angle would belong to another."""
    position = torch.tensor(5000.0)
    assert position.to(torch.bfloat16) != position
    cos = rotary_table(5001, 64, 1e6, torch.bfloat16)[0][5000, 0]
    assert abs(cos.item() - math.cos(5000)) < 2**-8
    assert abs(math.cos(position.to(torch.bfloat16).item()) - math.cos(5000)) > 2**-8


def test_rows_follow_position_ids_and_do_not_depend_on_growth():
    ids = torch.tensor([[0, 3, 3, 511], [7, 0, 1, 2]])
    small, grown = (RotaryTables(32, 1e6, torch.bfloat16, CPU) for _ in range(2))
    grown.at(torch.zeros(1, 1, dtype=torch.int64), 5000)
    cos, sin = rotary_table(512, 32, 1e6, torch.bfloat16)
    for mine, other, table in zip(small.at(ids, 512), grown.at(ids, 512), (cos, sign_first_half(sin))):
        assert mine.shape == (2, 4, 1, 32)
        assert same_bits(mine, other) and same_bits(mine[:, :, 0], table[ids])
        assert not same_bits(mine[0, 0], mine[0, 1])


def test_table_grows_when_a_longer_context_asks():
    tables = RotaryTables(32, 1e6, torch.float32, CPU)
    tables.at(torch.tensor([[3]]), 4)
    cos, _ = tables.at(torch.tensor([[1500]]), 1501)
    assert same_bits(cos[0, 0, 0], rotary_table(2048, 32, 1e6, torch.float32)[0][1500])


def test_rotate_half_negates_the_second_half():
    assert rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_rotation_is_relative_and_position_zero_is_the_identity():
    query, key = (
        random_tensor(1, 1, 1, 32, dtype=torch.float64),
        random_tensor(1, 1, 1, 32, dtype=torch.float64, seed=1),
    )
    tables = RotaryTables(32, 1e4, torch.float64, CPU)

    def turned(x, position):
        return rotate(x, *tables.at(torch.tensor([[position]]), 100))

    assert torch.equal(turned(query, 0), query) and not torch.equal(turned(query, 1), query)
    at_five, at_fifty = ((turned(query, p) * turned(key, p + 7)).sum() for p in (5, 50))
    assert abs(at_five - at_fifty) < 1e-12 * abs(at_five)
    assert abs(at_five - (turned(query, 5) * turned(key, 13)).sum()) > 1e-6


def test_tables_first_used_in_inference_mode_still_train():
    tables = RotaryTables(8, 1e4, torch.float32, CPU)
    ids = torch.tensor([[0, 1, 2]])
    with torch.inference_mode():
        tables.at(ids, 3)
    x = random_tensor(1, 3, 2, 8).requires_grad_()
    rotate(x, *tables.at(ids, 3)).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)
