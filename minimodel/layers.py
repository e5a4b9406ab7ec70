"""RMSNorm, rotary position embedding and SiLU under transformers' names, with the faster RMSNorm of equal bits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import at_least_fp32

FIRST_LENGTH = 512  # positions in the first rotary table; it doubles when a longer context needs more


def rms_norm_literal(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns hidden_states [B, T, E] normalised over the last axis and scaled by weight [E], in the same dtype.

    Source of the rounding order: transformers `Qwen2RMSNorm` (4.46 to 5.24).
    """
    # mean square and rsqrt see at least FP32: BF16 keeps 8 bits of a sum over E terms
    wide = hidden_states.to(at_least_fp32(hidden_states.dtype))  # [B, T, E]
    variance = wide.pow(2).mean(-1, keepdim=True)  # [B, T, 1]
    normalised = wide * torch.rsqrt(variance + eps)  # [B, T, E]
    # the weight product sees the model dtype, so the weight multiplies a rounded value
    return weight * normalised.to(hidden_states.dtype)  # [B, T, E]


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `rms_norm_literal`'s bits. On the CPU torch's `rms_norm` without a weight does the same in one call.

    The literal steps run on an accelerator, where torch's call sums in another order, and in training, where its
    gradient differs.
    """
    if hidden_states.device.type != "cpu" or hidden_states.requires_grad:
        return rms_norm_literal(hidden_states, weight, eps)
    return weight * F.rms_norm(hidden_states, hidden_states.shape[-1:], None, eps)  # [B, T, E]


def rotary_table(length: int, head_dim: int, rope_theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of positions 0 to length-1, each [length, D] in `dtype` on the CPU.

    The angles are at least FP32 whatever the model dtype: position 5,000 in BF16 would be 4,992 or 5,024.
    Source: transformers `Qwen2RotaryEmbedding` (4.46 to 5.24), rope_type "default".
    """
    wide = at_least_fp32(dtype)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(wide) / head_dim  # [D/2]
    inv_freq = 1.0 / (rope_theta**exponents)  # [D/2]
    positions = torch.arange(length, dtype=torch.int64, device="cpu").to(wide)  # [length]
    freqs = positions[:, None] * inv_freq[None, :]  # [length, D/2]
    angles = torch.cat((freqs, freqs), dim=-1)  # [length, D]
    # the query and key products see the model dtype: this cast comes last
    return angles.cos().to(dtype), angles.sin().to(dtype)  # [length, D] each


class RotaryEmbedding:
    """cos and sin of one model by position, computed once on the CPU and grown by doubling."""

    def __init__(self, head_dim: int, rope_theta: float, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._device = (head_dim, rope_theta, dtype), device
        self._cos = self._sin = torch.empty(0)  # [length, 1, D]

    def __call__(self, position_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, [B, T, 1, D] each, of position_ids [B, T], all of which are below `length`."""
        if length > len(self._cos):
            # always computed on the CPU, so that every device rotates by the same table
            tables = rotary_table(max(FIRST_LENGTH, 1 << (length - 1).bit_length()), *self._shape)
            self._cos, self._sin = (table[:, None].to(self._device) for table in tables)  # [length, 1, D]
        return self._cos[position_ids], self._sin[position_ids]  # [B, T, 1, D] each


def rotate_half(x: Tensor) -> Tensor:
    """Returns x [..., D] with its second half, negated, in front of its first half."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # [..., D]


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [B, T, H, D] rotated by cos, sin [B, T, 1, D]; both products and the sum round to x's dtype."""
    return (x * cos) + (rotate_half(x) * sin)  # [B, T, H, D]


def silu_in_steps(x: Tensor) -> Tensor:
    """Returns x / (1 + exp(-x)); an element's bits do not depend on its place.

    torch's FP32 and FP64 SiLU on the CPU uses a vectorised exp for full SIMD lanes and a scalar exp for the tail of
    each thread's share. In BF16 and FP16 both give the same bits for all 65,536 values, as a test checks.
    """
    return F.silu(x) if x.dtype in (torch.bfloat16, torch.float16) else x / (1 + torch.exp(-x))


# by linear kernel
SILU_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"plain": F.silu, "packed": F.silu, "tiled": silu_in_steps}
