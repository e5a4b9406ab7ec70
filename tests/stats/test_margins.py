"""Margins in units in the last place, against the next number that torch gives."""

import math

import pytest
import torch

from stats.margins import margin_ulps, ulp


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_a_ulp_is_the_distance_to_the_next_number(dtype, torch_dtype):
    for value in (1.0, 1.5, 2.0, 3.25, 17.0, 0.375):
        start = torch.tensor(value, dtype=torch_dtype)
        following = torch.nextafter(start, torch.tensor(math.inf, dtype=torch_dtype))
        assert ulp(value, dtype) == ulp(-value, dtype) == float(following) - value
    assert ulp(0.0, dtype) == 0.0


def test_a_margin_is_counted_in_the_spacing_of_its_best_logit():
    assert margin_ulps(0.125, 17.0, "bf16") == 1.0 and margin_ulps(0.125, 17.0, "fp16") == 8.0
    assert margin_ulps(0.0, -17.0, "bf16") == 0.0
    assert margin_ulps(None, 17.0, "bf16") is margin_ulps(0.1, None, "bf16") is margin_ulps(0.1, 0.0, "bf16") is None
