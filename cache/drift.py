"""Comparing caches and logits: a verdict in raw bits, the first difference, and how far apart the numbers are."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import bits
from minimodel.errors import InputError

# in float64: of the absolute differences the largest, the sum and the sum of squares; the sums of squares of each side
Sizes = tuple[float, float, float, float, float]
NUMBERS = ("max_abs", "mean_abs", "delta_l2", "left_l2", "right_l2", "relative_l2")


@dataclass(frozen=True)
class TensorDrift:
    """The differences between two tensors of one shape, in float64."""

    elements: int
    differing: int  # elements whose bits differ
    sizes: Sizes | None  # None where either side holds NaN or infinity: sums mean nothing, and JSON cannot hold them
    first: tuple[int, ...] | None = None  # index of the first differing element (see `compare_tensors`); None if exact

    @property
    def exact(self) -> bool:
        return self.differing == 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the ledger's object."""
        counts = {"exact": self.exact, "differing": self.differing, "elements": self.elements}
        if self.sizes is None:
            return {**counts, "finite": False, **dict.fromkeys(NUMBERS)}
        max_abs, sum_abs, *squares = self.sizes
        delta, left, right = (math.sqrt(x) for x in squares)
        largest = max(left, right)  # the larger source norm (paper, section 3.4)
        relative = delta / largest if largest else 0.0
        mean_abs = sum_abs / self.elements if self.elements else 0.0
        return {**counts, "finite": True, **dict(zip(NUMBERS, (max_abs, mean_abs, delta, left, right, relative)))}


@dataclass(frozen=True)
class CacheDrift:
    """The differences between two caches."""

    layers: tuple[tuple[TensorDrift, TensorDrift], ...]  # (key, value) per layer

    @property
    def exact(self) -> bool:
        return all(drift.exact for pair in self.layers for drift in pair)

    @property
    def first_difference(self) -> dict[str, Any] | None:
        """Returns {layer, tensor, position}: the first differing tensor in forward order and its first such slot."""
        for layer, pair in enumerate(self.layers):
            for name, drift in zip(("key", "value"), pair):
                if drift.first is not None:
                    return {"layer": layer, "tensor": name, "position": drift.first[0]}
        return None

    def as_dict(self) -> dict[str, Any]:
        """Returns the ledger's object: whole-cache numbers, first difference, and one pair of objects per layer."""
        flat = [drift for pair in self.layers for drift in pair]
        known, sizes = [drift.sizes for drift in flat if drift.sizes is not None], None
        if len(known) == len(flat):
            largest, *sums = zip(*known)
            sizes = (max(largest), *map(sum, sums))
        whole = TensorDrift(sum(d.elements for d in flat), sum(d.differing for d in flat), sizes)
        layers = [{"key": key.as_dict(), "value": value.as_dict()} for key, value in self.layers]
        return {**whole.as_dict(), "first_difference": self.first_difference, "layers": layers}


def compare(left: KVCache, right: KVCache) -> CacheDrift:
    """Compares every key and value tensor of two caches. InputError for another layer count, shape or dtype."""
    if left.layers != right.layers:
        raise InputError(f"caches: expected equal layer counts, found {left.layers} and {right.layers}")
    drifts = [
        compare_tensors(mine, theirs, f"layer {layer} {name}", positions=True)
        for (layer, name, mine), (_, _, theirs) in zip(left.tensors(), right.tensors())
    ]
    return CacheDrift(tuple(zip(drifts[::2], drifts[1::2])))


def compare_tensors(left: Tensor, right: Tensor, name: str, positions: bool = False) -> TensorDrift:
    """Compares two tensors of one dtype and shape. `first` is the first differing index in row-major order.

    positions: for keys and values [B, H_kv, S, D], `first` is (slot, copy, head, component) at the lowest slot instead.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise InputError(
            f"{name}: expected equal dtype and shape, found {left.dtype} {list(left.shape)} and "
            f"{right.dtype} {list(right.shape)}"
        )
    unequal = bits(left) != bits(right)
    differing = int(unequal.sum())
    first = first_true(unequal, 2 if positions else 0) if differing else None
    # differences and norms see FP64, which holds the difference of two BF16 or FP32 values exactly or nearly so
    wide = left.to(torch.float64)
    other = right.to(torch.float64) if differing else wide
    left_square = float(wide.square().sum())
    right_square = float(other.square().sum()) if differing else left_square
    sizes: Sizes | None = (0.0, 0.0, 0.0, left_square, right_square)
    if not math.isfinite(left_square + right_square):
        sizes = None
    elif differing:
        delta = (wide - other).abs()
        sizes = (float(delta.max()), float(delta.sum()), float(delta.square().sum()), left_square, right_square)
    return TensorDrift(left.numel(), differing, sizes, first)


def first_true(flags: Tensor, axis: int = 0) -> tuple[int, ...]:
    """Returns the index of the first true element in row-major order, after `axis` was moved to the front."""
    ordered = flags.movedim(axis, 0)
    flat = ordered.reshape(-1).to(torch.uint8).argmax().cpu()
    return tuple(int(i) for i in torch.unravel_index(flat, ordered.shape))
