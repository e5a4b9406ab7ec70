"""Linear kernels by name. A kernel takes the weight once, at load, and gives the function that every call uses."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from minimodel.linear_packed import packed
from minimodel.linear_tiled import tiled

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """torch's F.linear: weight [out, in], bias [out] or None. What transformers calls; the reference for bits."""
    return partial(F.linear, weight=weight, bias=bias)


LINEAR_KERNELS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "plain": plain,
    "packed": packed,
    "tiled": tiled,
}
