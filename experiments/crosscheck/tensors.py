"""Two tensors of one step: whether their bits are equal, and if not, the first element that differs."""

import re
from dataclasses import dataclass
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
    """The first differing element of a step. layer, head: None where the step has none. position: the token slot.

    component: index along the last axis (within the head where there is one). left_bits, right_bits: hexadecimal.
    ulp: representable values between the two, 0 for -0 against +0, None when one is NaN. differing of elements: how
    many of the step's elements differ.
    """

    step: str
    layer: int | None
    tensor: str
    head: int | None
    position: int
    component: int
    left: float
    right: float
    left_bits: str
    right_bits: str
    ulp: int | None
    differing: int
    elements: int

    def line(self) -> str:
        """One line for people."""
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
    """None when equal in every bit; else the lowest token slot, in it the first copy, head and component.

    The last token of both tensors is slot stop - 1. InputError when dtype or shape differ.
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
    """(head, component within it); rest is the index without the token axis: copy, (head,) component."""
    if rank == 4:
        return rest[1], rest[2]
    if head_dim is not None and step.rpartition(".")[2] in BY_HEAD:
        return rest[-1] // head_dim, rest[-1] % head_dim
    return None, rest[-1]


def ulp_distance(left: Tensor, right: Tensor) -> int | None:
    """Steps from one floating value to the other along the representable values of their dtype; None with NaN."""
    if bool(left.isnan()) or bool(right.isnan()):
        return None
    return abs(_ordinal(left) - _ordinal(right))


def _ordinal(value: Tensor) -> int:
    """Sign and magnitude as one ascending integer; both zeros are 0."""
    raw = int(bits(value))
    sign = 1 << (8 * value.element_size() - 1)
    return raw if raw >= 0 else -(raw + sign)


def hex_bits(value: Tensor) -> str:
    """The raw bits of one element, as 0x and all digits."""
    width = value.element_size()
    return f"0x{int(bits(value)) & ((1 << (8 * width)) - 1):0{2 * width}x}"


def as_dict(difference: Difference | None) -> dict[str, Any] | None:
    """For JSON: NaN and infinity as text."""
    if difference is None:
        return None
    raw = dict(difference.__dict__)
    for side in ("left", "right"):
        if not torch.isfinite(torch.tensor(raw[side], dtype=torch.float64, device="cpu")):
            raw[side] = repr(raw[side])
    return raw
