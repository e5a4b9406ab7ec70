"""Tensors as raw bits, and what every physical copy of a row must satisfy."""

import torch
from torch import Tensor

COPIES = 2  # identical copies of each request in the physical batch (paper, section 3.1)

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


class RowFailure(RuntimeError):
    """A row that must not be used: copies that disagree, NaN or infinity, or a tensor that fails its check."""


def bits(tensor: Tensor) -> Tensor:
    """Returns the same memory as integers: float equality calls -0 and +0 equal, and NaN unequal to itself."""
    return tensor.view(_INTEGER[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Returns whether dtype, shape and raw bits are equal."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def equal_copies(tensor: Tensor) -> bool:
    """Returns whether every copy along the first axis holds the same bits."""
    return tensor.shape[0] <= 1 or torch.equal(bits(tensor[1:]), bits(tensor[:1].expand_as(tensor[1:])))


def require_equal_copies(tensor: Tensor, name: str) -> None:
    """RowFailure unless every copy along the first axis holds the same bits."""
    if not equal_copies(tensor):
        raise RowFailure(f"{name}: the physical copies differ in bits")


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no element is NaN or infinite, from the minimum and the maximum, which propagate both."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def require_finite(tensor: Tensor, name: str) -> None:
    """RowFailure where an element is NaN or infinite."""
    if not all_finite(tensor):
        raise RowFailure(f"{name}: expected finite values, found NaN or infinity")


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums and angles: FP32 for BF16, FP16 and FP32; FP64 stays FP64, as it is the oracle."""
    return torch.promote_types(dtype, torch.float32)
