"""Compares two tensors of one step by their bits and finds the first element that differs."""

import re
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from experiments.run.saving import token_axis
from minimodel.bits import bits
from minimodel.errors import refuse

LAYER = re.compile(r"layers\.(\d+)\.(.+)")
BY_HEAD = ("q_proj", "k_proj", "v_proj", "attention")  # steps [B, T, H*D] whose components belong to heads


@dataclass(frozen=True)
class Difference:
    """The first differing element of a step."""

    step: str
    layer: int | None  # None: a step outside the layers
    tensor: str
    head: int | None  # None: a step without heads
    position: int  # token slot
    component: int  # index along the last axis, within the head if there is one
    left: float
    right: float
    left_bits: str  # hexadecimal
    right_bits: str
    ulp: int | None  # representable values from one to the other, 0 for -0 against +0; None: one is NaN
    differing: int  # elements of the step that differ
    elements: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON form, NaN and infinity as text."""
        values = {side: vars(self)[side] for side in ("left", "right")}
        return {**vars(self), **{side: value if isfinite(value) else repr(value) for side, value in values.items()}}

    def line(self) -> str:
        """Returns one line of text."""
        place = [f"layer {self.layer}"] if self.layer is not None else []
        place += [f"head {self.head}"] if self.head is not None else []
        place += [f"position {self.position}", f"component {self.component}"]
        ulp = "NaN" if self.ulp is None else f"{self.ulp} ULP"
        return (
            f"{self.step}: {', '.join(place)}: A {self.left!r} ({self.left_bits}), B {self.right!r} "
            f"({self.right_bits}), {ulp}; {self.differing} of {self.elements} elements differ "
            f"({100 * self.differing / self.elements:.3g} %)"
        )


def first_difference(step: str, left: Tensor, right: Tensor, stop: int, head_dim: int | None) -> Difference | None:
    """Returns the difference at the lowest token slot, in it the first copy, head and component; None: all bits equal.

    The last token of both tensors is slot stop - 1. InputError where dtype or shape differ.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        shown = f"{right.dtype} {list(right.shape)}"
        raise refuse(f"step {step}: dtype and shape", f"{left.dtype} {list(left.shape)} on both sides", shown)
    unequal = bits(left) != bits(right)
    differing = int(unequal.sum())
    if differing == 0:
        return None
    axis = token_axis(left) if left.ndim > 2 else None
    ordered = unequal if axis is None else unequal.movedim(axis, 0)
    flat = int(ordered.reshape(-1).to(torch.uint8).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), ordered.shape)]
    if axis is None:
        slot, rest = stop - 1, index
    else:
        slot, rest = stop - left.shape[axis] + index[0], index[1:]
        index = [*rest[:axis], index[0], *rest[axis:]]
    found = LAYER.fullmatch(step)
    head, component = _head(step, left.ndim, rest, head_dim)
    mine, theirs = left[tuple(index)], right[tuple(index)]
    return Difference(
        step,
        int(found[1]) if found else None,
        found[2] if found else step,
        head,
        slot,
        component,
        float(mine),
        float(theirs),
        hex_bits(mine),
        hex_bits(theirs),
        ulp_distance(mine, theirs),
        differing,
        left.numel(),
    )


def _head(step: str, rank: int, rest: list[int], head_dim: int | None) -> tuple[int | None, int]:
    """Returns (head, component within it); `rest` is the index without the token axis: copy, (head,) component."""
    if rank == 4:
        return rest[1], rest[2]
    if head_dim is not None and step.rpartition(".")[2] in BY_HEAD:
        return rest[-1] // head_dim, rest[-1] % head_dim
    return None, rest[-1]


def ulp_distance(left: Tensor, right: Tensor) -> int | None:
    """Returns the steps between two values along the representable values of their dtype; None with NaN."""
    if bool(left.isnan()) or bool(right.isnan()):
        return None
    return abs(_ordinal(left) - _ordinal(right))


def _ordinal(value: Tensor) -> int:
    """Returns sign and magnitude as one ascending integer; both zeros are 0."""
    raw = int(bits(value))
    sign = 1 << (8 * value.element_size() - 1)
    return raw if raw >= 0 else -(raw + sign)


def hex_bits(value: Tensor) -> str:
    """Returns the raw bits of one element, as 0x and all digits."""
    width = value.element_size()
    return f"0x{int(bits(value)) & ((1 << (8 * width)) - 1):0{2 * width}x}"
