"""RMSNorm: the value, and the rounding order that makes its bits."""

import numpy as np
import torch

from minimodel.bits import same_bits
from minimodel.layers import rms_norm
from tests.helpers import random_tensor


def test_value_against_numpy_in_float64():
    x, weight = random_tensor(2, 3, 64, dtype=torch.float64), random_tensor(64, dtype=torch.float64, seed=1)
    exact = weight.numpy() * x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6).numpy(), exact, rtol=1e-12)
    assert not np.allclose(rms_norm(x, weight, 1e-1).numpy(), exact, rtol=1e-3)


def test_weight_multiplies_the_value_rounded_to_the_model_dtype():
    """transformers Qwen2RMSNorm: statistics in FP32, rounded to BF16, and only then the product."""
    x, weight = random_tensor(4, 50, 256, dtype=torch.bfloat16), 1 + random_tensor(256, dtype=torch.bfloat16, seed=1)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert same_bits(rms_norm(x, weight, 1e-6), weight * normalised.to(torch.bfloat16))
    product_in_fp32 = (weight.float() * normalised).to(torch.bfloat16)
    statistics_in_bf16 = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert not same_bits(rms_norm(x, weight, 1e-6), product_in_fp32)
    assert not same_bits(rms_norm(x, weight, 1e-6), statistics_in_bf16)


def test_dtype_is_kept():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert rms_norm(random_tensor(1, 1, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-6).dtype == dtype
