"""Rotary position embedding: half-split halves, FP32 angles, tables cast last."""

import torch
from torch import Tensor

FIRST_LENGTH = 512  # rows of the first table; it doubles when a longer context asks


def rotary_table(length: int, head_dim: int, rope_theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 to length-1, each [length, D] in `dtype` on the CPU.

    The angles are FP32 whatever the model dtype (position 5,000 in BF16 would be 4,992 or 5,024), and the cast to the
    model dtype comes last, after cos and sin. FP64 models take FP64 angles: they are the oracle.
    Source: transformers `Qwen2RotaryEmbedding` (4.46 to 5.24), rope_type "default".
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inv_freq = 1.0 / (rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(wide) / head_dim))
    positions = torch.arange(length, dtype=torch.int64, device="cpu").to(wide)
    freqs = positions[:, None] * inv_freq[None, :]
    angles = torch.cat((freqs, freqs), dim=-1)
    # the query and key products see the model dtype
    return angles.cos().to(dtype), angles.sin().to(dtype)


class RotaryTables:
    """The tables of one model, built once and grown by doubling; a lookup is one gather each for cos and signed sin."""

    def __init__(self, head_dim: int, rope_theta: float, dtype: torch.dtype, device: torch.device) -> None:
        self._head_dim, self._rope_theta, self._dtype, self._device = head_dim, rope_theta, dtype, device
        self._length = 0
        self._cos = self._sin = torch.empty(0)

    def at(self, position_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """What `rotate` takes for heads [B, T, H, D]: cos and signed sin [B, T, 1, D] of position_ids [B, T], all of
        which are below `length`.
        """
        if length > self._length:
            self._length = max(FIRST_LENGTH, 1 << (length - 1).bit_length())
            # always computed on the CPU, so that every device rotates by the same table
            cos, sin = rotary_table(self._length, self._head_dim, self._rope_theta, self._dtype)
            self._cos, self._sin = cos[:, None].to(self._device), sign_first_half(sin)[:, None].to(self._device)
        return self._cos[position_ids], self._sin[position_ids]


def rotate_half(x: Tensor) -> Tensor:
    """[..., D] -> [..., D]: the second half negated in front of the first."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys x [B, H, T, D] by cos, sin [B, 1, T, D]; every product and the sum round to x's dtype."""
    return (x * cos) + (rotate_half(x) * sin)


def sign_first_half(sin: Tensor) -> Tensor:
    """sin [..., D] with its first half negated: the sign that `rotate_half` gives x, moved over."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """`apply_rotary` in four operations instead of seven, to the same bits: (-a) * b and a * (-b) round alike.

    signed_sin comes from `sign_first_half`; swapping the halves of x is a roll by D/2.
    """
    return (x * cos) + (torch.roll(x, x.shape[-1] // 2, dims=-1) * signed_sin)
