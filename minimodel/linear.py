"""Linear kernels by name. A kernel takes the weights of several maps of one input once, at load.

It returns the function that every call uses: [..., in] -> one [..., out] per map. q, k and v are such maps, and gate
and up: `packed` computes them as one product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from minimodel.invariant.linear import tiled
from minimodel.packed import packed

Part = tuple[Tensor, Tensor | None]  # one map: weight [out, in], bias [out]
Maps = Callable[[Tensor], Sequence[Tensor]]  # [..., in] -> [..., out] of each map


@dataclass(frozen=True)
class Plain:
    """torch's F.linear for each map: what transformers calls; the reference for bits."""

    parts: Sequence[Part]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in self.parts]


LINEAR_KERNELS: dict[str, Callable[[Sequence[Part]], Maps]] = {
    "plain": Plain,
    "packed": lambda parts: packed(parts) or Plain(parts),  # plain where packing has F.linear's bits for no call
    "tiled": tiled,
}
