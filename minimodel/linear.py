"""Linear kernels by name. A kernel is called once, at load, with the weights of all projections that read one input.

It returns the function that every step calls: [..., in] -> one [..., out] per projection. q_proj, k_proj and v_proj
read one input, and so do gate_proj and up_proj: `packed` computes them as one product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from minimodel.invariant.linear import tiled
from minimodel.packed import packed

Part = tuple[Tensor, Tensor | None]  # one projection: weight [out, in], bias [out]
Projections = Callable[[Tensor], Sequence[Tensor]]  # [..., in] -> [..., out] of each projection


@dataclass(frozen=True)
class Plain:
    """torch's F.linear for each projection: what transformers calls; the reference for bits."""

    parts: Sequence[Part]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in self.parts]


LINEAR_KERNELS: dict[str, Callable[[Sequence[Part]], Projections]] = {
    "plain": Plain,
    "packed": lambda parts: packed(parts) or Plain(parts),  # plain where no packed call has F.linear's bits
    "tiled": tiled,
}
