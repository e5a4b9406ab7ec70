"""Numbers as raw bits: the only equality this project means."""

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of its width: float equality calls -0 and +0 equal, and NaN unequal to itself."""
    return tensor.view(_INTEGER[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and raw bits."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))
