"""Equality of raw bits, against what float equality would say; finiteness of any dtype."""

import pytest
import torch

from minimodel.bits import all_finite, bits, same_bits
from tests.helpers import DTYPES, random_tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_two_signs_differ_and_a_nan_equals_itself_and_no_other_payload(dtype):
    """pytorch/pytorch 137337 (case 17)."""
    plus, minus = torch.zeros(3, dtype=dtype), -torch.zeros(3, dtype=dtype)
    assert torch.equal(plus, minus) and not same_bits(plus, minus)
    nan = torch.full((2,), float("nan"), dtype=dtype)
    other = nan.clone()
    bits(other)[1] ^= 1
    assert same_bits(nan, nan.clone()) and not torch.equal(nan, nan.clone())
    assert other.isnan().all() and not same_bits(nan, other)


def test_dtype_and_shape_belong_to_equality():
    assert torch.equal(torch.ones(2), torch.ones(2).to(torch.bfloat16))
    assert not same_bits(torch.ones(2), torch.ones(2).to(torch.bfloat16))
    assert not same_bits(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not same_bits(torch.zeros(2, dtype=torch.int16), torch.zeros(2, dtype=torch.bfloat16))


def test_bits_are_a_view_and_follow_strides():
    x = torch.arange(6.0).view(2, 3)
    assert bits(x).data_ptr() == x.data_ptr() and same_bits(x.T, x.T.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_finiteness_of_any_dtype_and_of_nothing(dtype):
    good = random_tensor(100, dtype=dtype)
    bits(good)[2] = 1  # subnormal
    assert all_finite(good) and all_finite(good[:0])
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = good.clone()
        bad[63] = value
        assert not all_finite(bad)
