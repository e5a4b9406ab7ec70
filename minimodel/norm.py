"""RMSNorm."""

import torch
from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis. hidden_states [B, T, E], weight [E] -> [B, T, E], same dtype.

    The rounding order is that of transformers `models/qwen2/modeling_qwen2.py` (4.46 to 5.24): statistics in at least
    FP32, cast back to the model dtype, and only then the weight product, so the weight multiplies a rounded value.
    """
    dtype = hidden_states.dtype
    # mean square and rsqrt see FP32: BF16 keeps 8 bits of a sum over E terms (FP64 stays FP64 for the oracle)
    wide = hidden_states if dtype == torch.float64 else hidden_states.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    normalised = wide * torch.rsqrt(variance + eps)
    # the weight product sees the model dtype
    return weight * normalised.to(dtype)
