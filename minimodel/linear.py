"""Linear kernels by name. A kernel takes the weight once, at load, and returns the function that every call uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from minimodel.invariant.linear import tiled
from minimodel.packed import packed, packed_maps

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]
Joint = Callable[[Tensor], Sequence[Tensor]]  # several maps of one input
Part = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


@dataclass(frozen=True)
class Plain:
    """torch's F.linear: what transformers calls; the reference for bits."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class OneByOne:
    """Each of several maps on the same input."""

    maps: Sequence[Linear]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return [each(x) for each in self.maps]


LINEAR_KERNELS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "plain": Plain,
    "packed": packed,
    "tiled": tiled,
}


def together(kernel: str, parts: Sequence[Part]) -> Joint:
    """Returns several maps of one input as one function: one product where they can be packed, one each otherwise.

    In BF16 and FP16 each map keeps the bits it has alone. FP32 `packed` matches no other kernel bit for bit.
    """
    joined = packed_maps(parts) if kernel == "packed" else None
    return joined or OneByOne([LINEAR_KERNELS[kernel](weight, bias) for weight, bias in parts])


def linear_of(kernel: str, weights: Mapping[str, Tensor], name: str) -> Linear:
    """Returns the module `name` of a checkpoint under a kernel: its `.weight`, and its `.bias` if there is one."""
    return LINEAR_KERNELS[kernel](weights[name + ".weight"], weights.get(name + ".bias"))


def joint_of(kernel: str, weights: Mapping[str, Tensor], *names: str) -> Joint:
    """Returns several modules of a checkpoint that read one input (see `together`)."""
    return together(kernel, [(weights[name + ".weight"], weights.get(name + ".bias")) for name in names])
