"""Comparing caches and logits: a verdict in raw bits, the first difference, and how far apart the numbers are."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import bits
from minimodel.errors import InputError


@dataclass(frozen=True)
class TensorDrift:
    """The differences between two tensors of one shape, in float64.

    Where either tensor holds NaN or infinity the numbers are None: arithmetic on them means nothing, and JSON cannot
    hold them.
    """

    elements: int
    differing: int  # elements whose bits differ
    max_abs: float | None  # the largest absolute difference
    sum_abs: float | None  # the sum of absolute differences
    delta_square: float | None  # the sum of squared differences
    left_square: float | None  # the sum of squares of the left tensor
    right_square: float | None  # the sum of squares of the right tensor
    first: tuple[int, ...] | None  # index of the first differing element in row-major order; None when exact

    @property
    def exact(self) -> bool:
        return self.differing == 0

    def as_dict(self) -> dict[str, Any]:
        return _numbers(
            self.exact,
            self.differing,
            self.elements,
            self.max_abs,
            self.sum_abs,
            self.delta_square,
            self.left_square,
            self.right_square,
        )


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
        whole = _numbers(
            self.exact,
            sum(d.differing for d in flat),
            sum(d.elements for d in flat),
            _over(max, [d.max_abs for d in flat]),
            _over(sum, [d.sum_abs for d in flat]),
            _over(sum, [d.delta_square for d in flat]),
            _over(sum, [d.left_square for d in flat]),
            _over(sum, [d.right_square for d in flat]),
        )
        layers = [{"key": key.as_dict(), "value": value.as_dict()} for key, value in self.layers]
        return {**whole, "first_difference": self.first_difference, "layers": layers}


def compare(left: KVCache, right: KVCache) -> CacheDrift:
    """Compares every K and V tensor of two caches of one geometry; InputError names what differs in geometry."""
    if left.layers != right.layers:
        raise InputError(f"caches: expected equal layer counts, found {left.layers} and {right.layers}")
    layers = []
    for layer in range(left.layers):
        key = compare_tensors(left.keys(layer), right.keys(layer), f"layer {layer} key", positions=True)
        value = compare_tensors(left.values(layer), right.values(layer), f"layer {layer} value", positions=True)
        layers.append((key, value))
    return CacheDrift(tuple(layers))


def compare_tensors(left: Tensor, right: Tensor, name: str, positions: bool = False) -> TensorDrift:
    """Compares two tensors of one dtype and shape.

    `positions`: the third axis is the token slot, and `first` is (slot, copy, head, component) of the lowest slot.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise InputError(
            f"{name}: expected equal dtype and shape, found {left.dtype} {list(left.shape)} and "
            f"{right.dtype} {list(right.shape)}"
        )
    unequal = bits(left) != bits(right)
    differing = int(unequal.sum())
    first = first_true(unequal, 2 if positions else 0) if differing else None
    # differences and norms see FP64, where the subtraction of two BF16 or FP32 values is exact or nearly so
    wide = left.to(torch.float64)
    other = wide if differing == 0 else right.to(torch.float64)
    left_square = float(wide.square().sum())
    right_square = left_square if differing == 0 else float(other.square().sum())
    if not math.isfinite(left_square + right_square):
        return TensorDrift(left.numel(), differing, None, None, None, None, None, first)
    if differing == 0:
        return TensorDrift(left.numel(), 0, 0.0, 0.0, 0.0, left_square, right_square, None)
    delta = (wide - other).abs()
    return TensorDrift(
        left.numel(),
        differing,
        float(delta.max()),
        float(delta.sum()),
        float(delta.square().sum()),
        left_square,
        right_square,
        first,
    )


def first_true(flags: Tensor, axis: int = 0) -> tuple[int, ...]:
    """Returns the index of the first true element in row-major order, after `axis` was moved to the front."""
    ordered = flags.movedim(axis, 0)
    flat = int(ordered.reshape(-1).to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), ordered.shape))


def _over(function: Any, values: list[float | None]) -> float | None:
    return None if any(value is None for value in values) else function(values)


def _numbers(
    exact: bool,
    differing: int,
    elements: int,
    max_abs: float | None,
    sum_abs: float | None,
    delta_square: float | None,
    left_square: float | None,
    right_square: float | None,
) -> dict[str, Any]:
    if max_abs is None or sum_abs is None or delta_square is None or left_square is None or right_square is None:
        keys = ("max_abs", "mean_abs", "delta_l2", "left_l2", "right_l2", "relative_l2")
        return {"exact": exact, "differing": differing, "elements": elements, "finite": False, **dict.fromkeys(keys)}
    delta_l2, left_l2, right_l2 = (math.sqrt(x) for x in (delta_square, left_square, right_square))
    largest = max(left_l2, right_l2)  # the larger source norm (paper, section 3.4)
    return {
        "exact": exact,
        "differing": differing,
        "elements": elements,
        "finite": True,
        "max_abs": max_abs,
        "mean_abs": sum_abs / elements if elements else 0.0,
        "delta_l2": delta_l2,
        "left_l2": left_l2,
        "right_l2": right_l2,
        "relative_l2": delta_l2 / largest if largest else 0.0,
    }
