"""Compares the tensors of two computations by their bits and finds the first element that differs, in forward order."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from cache.drift import first_true
from experiments.run.saving import token_axis
from minimodel.bits import bits
from minimodel.errors import InputError, refuse

LAYER = re.compile(r"layers\.(\d+)\.(.+)")
ROTATED_OR_CACHED = re.compile(r".*k_rotary|layers\.\d+\.(key|value)")
BY_HEAD = ("q_proj", "k_proj", "v_proj", "attention")  # steps [B, T, H*D] whose components belong to heads
Side = tuple[Sequence[str], Callable[[str], Tensor]]  # names in forward order, and how to read the tensor of a name


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
        place = [f"{name} {vars(self)[name]}" for name in ("layer", "head") if vars(self)[name] is not None]
        place += [f"position {self.position}", f"component {self.component}"]
        ulp = "NaN" if self.ulp is None else f"{self.ulp} ULP"
        return (
            f"{self.step}: {', '.join(place)}: A {self.left!r} ({self.left_bits}), B {self.right!r} "
            f"({self.right_bits}), {ulp}; {self.differing} of {self.elements} elements differ "
            f"({100 * self.differing / self.elements:.3g} %)"
        )


def first_step(left: Side, right: Side, stop: int, by_slot: bool) -> tuple[Difference | None, int, int]:
    """Returns the first difference, how many steps differ, and how many both sides have.

    Forward order is step by step where one call held all slots, and slot by slot, then step by step, where each token
    had its own call (`by_slot`). So what the named element was computed from is equal on both sides, as far as both
    have it. Of two traces that kept different numbers of slots, the last slots that both hold are compared.
    """
    names = [name for name in left[0] if name in right[0]]
    if not names:
        raise InputError("steps: expected at least one of the same name on both sides, found none")
    keys = (name for name in left[0] if ROTATED_OR_CACHED.fullmatch(name))
    head_dim = next((left[1](name).shape[-1] for name in keys), None)
    found = []
    for name in names:
        mine, theirs = left[1](name), right[1](name)
        if mine.ndim == theirs.ndim >= 3:
            axis = token_axis(mine)
            kept = min(mine.shape[axis], theirs.shape[axis])
            mine, theirs = (one.narrow(axis, one.shape[axis] - kept, kept) for one in (mine, theirs))
        found.append(first_difference(name, mine, theirs, stop, head_dim))
    differing = [one for one in found if one is not None]
    best = min(differing, key=lambda one: one.position if by_slot else 0, default=None)
    return best, len(differing), len(names)


def in_memory(tensors: Mapping[str, Tensor]) -> Side:
    return list(tensors), tensors.__getitem__


def first_difference(step: str, left: Tensor, right: Tensor, stop: int, head_dim: int | None) -> Difference | None:
    """Returns the difference at the lowest token slot, in it the first copy, head and component; None: all bits equal.

    The last token of both tensors is slot stop - 1. InputError where dtype or shape differ.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        shown = f"{right.dtype} {list(right.shape)}"
        raise refuse(f"step {step}: dtype and shape", f"{left.dtype} {list(left.shape)} on both sides", shown)
    if left.ndim < 3:  # of the last token alone
        left, right = left.unsqueeze(1), right.unsqueeze(1)
    unequal = bits(left) != bits(right)
    axis, differing = token_axis(left), int(unequal.sum())
    if differing == 0:
        return None
    slot, *rest = index = first_true(unequal, axis)
    mine, theirs = (one.movedim(axis, 0)[index] for one in (left, right))
    found = LAYER.fullmatch(step)
    head, component = (rest[1] if left.ndim == 4 else None), rest[-1]
    if left.ndim == 3 and head_dim is not None and step.rpartition(".")[2] in BY_HEAD:
        head, component = divmod(component, head_dim)
    return Difference(
        step=step,
        layer=int(found[1]) if found else None,
        tensor=found[2] if found else step,
        head=head,
        position=stop - left.shape[axis] + slot,
        component=component,
        left=float(mine),
        right=float(theirs),
        left_bits=hex_bits(mine),
        right_bits=hex_bits(theirs),
        ulp=ulp_distance(mine, theirs),
        differing=differing,
        elements=left.numel(),
    )


def ulp_distance(left: Tensor, right: Tensor) -> int | None:
    """Returns the steps between two values along the representable values of their dtype; None with NaN."""
    if bool(left.isnan()) or bool(right.isnan()):
        return None
    sign = 1 << (8 * left.element_size() - 1)
    mine, theirs = (raw if raw >= 0 else -(raw + sign) for raw in (int(bits(left)), int(bits(right))))
    return abs(mine - theirs)  # sign and magnitude as one ascending integer, both zeros 0


def hex_bits(value: Tensor) -> str:
    """Returns the raw bits of one element, as 0x and all digits."""
    width = value.element_size()
    return f"0x{int(bits(value)) & ((1 << (8 * width)) - 1):0{2 * width}x}"
