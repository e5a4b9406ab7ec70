"""Linear kernels by name. A kernel takes the weight once, at load, and gives the function that every call uses."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from minimodel.linear_packed import Part, one_by_one, packed, packed_together
from minimodel.linear_tiled import tiled

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]
Joint = Callable[[Tensor], Sequence[Tensor]]  # several maps of one input


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """torch's F.linear: weight [out, in], bias [out] or None. What transformers calls; the reference for bits."""
    return partial(F.linear, weight=weight, bias=bias)


LINEAR_KERNELS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "plain": plain,
    "packed": packed,
    "tiled": tiled,
}


def together(kernel: str, parts: Sequence[Part]) -> Joint:
    """Maps of one input under a kernel's name: one product where it is `packed`, one each otherwise.

    In BF16 and FP16 each keeps the bits it has alone; FP32 `packed` promises nobody's bits.
    """
    if kernel == "packed":
        return packed_together(parts)
    return one_by_one([LINEAR_KERNELS[kernel](weight, bias) for weight, bias in parts])
