"""RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_literal` in one call instead of seven, to the same bits (a test holds them together).

    On the CPU torch's own `rms_norm` without a weight takes the same steps in the same order. Elsewhere it is one fused
    kernel with a sum of its own, and training keeps the literal form's gradient: both take the literal steps.
    """
    if hidden_states.device.type != "cpu" or hidden_states.requires_grad:
        return rms_norm_literal(hidden_states, weight, eps)
    # torch's statistics see at least FP32 and its result is cast back, so the weight product sees the model dtype
    return weight * F.rms_norm(hidden_states, hidden_states.shape[-1:], None, eps)


def rms_norm_literal(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
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
