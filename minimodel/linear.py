"""Linear kernels by name. A kernel takes the weight once, at load, and gives the function that every call uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from minimodel.invariant.linear import tiled
from minimodel.packed import OneByOne, Part, packed, packed_together

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]
Joint = Callable[[Tensor], Sequence[Tensor]]  # several maps of one input


@dataclass(frozen=True)
class Plain:
    """torch's F.linear: what transformers calls; the reference for bits."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


LINEAR_KERNELS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "plain": Plain,
    "packed": packed,
    "tiled": tiled,
}


def together(kernel: str, parts: Sequence[Part]) -> Joint:
    """Maps of one input under a kernel's name: one product where it is `packed`, one each otherwise.

    In BF16 and FP16 each keeps the bits it has alone; FP32 `packed` promises nobody's bits.
    """
    if kernel == "packed":
        return packed_together(parts)
    return OneByOne([LINEAR_KERNELS[kernel](weight, bias) for weight, bias in parts])
