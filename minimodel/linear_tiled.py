"""The batch-invariant linear kernel: every row meets one GEMM shape, proven to treat all its rows alike.

A library sums a row's products in an order that it picks by the number of rows (oneDNN's BF16 changes at 33 rows on a
CPU with AMX, MKL's FP32 at 2 and at about 16) and, with several threads, by the row's place in the call. So rows go in
tiles of a fixed size, the last padded with zero rows, and a tile is used only after `proof` has shown on this device
that neither place nor threads matter in it. Calls of other sizes are used too where the proof finds the tile's bits.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.errors import InputError
from minimodel.linear_packed import can_pack, pack
from minimodel.proof import Rows, place_does_not_matter, random_rows, sizes_like, thread_counts

# in order of preference; packed tiles of 32 rows cost little more than two rows, and a long call little more than one
CANDIDATES = (("packed", 32), ("plain", 32), ("plain", 8), ("plain", 1))
SIZES = (2, 8, 32, 128, 512)
PROOF_ROWS = 512
PROOF_ELEMENTS = 1 << 23  # the outputs of a proof: a vocabulary-wide head is tried on fewer rows

Plan = tuple[str, tuple[int, ...]]  # the primitive, and the call sizes that agree, ascending
_PLANS: dict[tuple[object, ...], Plan] = {}  # a proof holds for a shape, not for the numbers in a weight


def tiled(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight [out, in], bias [out] or None -> a function [..., in] -> [..., out] whose rows keep their bits in any call.

    InputError names the shape when nothing on this device can be proven invariant.
    """
    primitive, sizes = _plan(weight, bias)
    return partial(_run, _rows_function(primitive, weight, bias), sizes)


def _rows_function(primitive: str, weight: Tensor, bias: Tensor | None) -> Rows:
    return pack(weight, bias) if primitive == "packed" else partial(F.linear, weight=weight, bias=bias)


def _plan(weight: Tensor, bias: Tensor | None) -> Plan:
    shape = (tuple(weight.shape), bias is None, weight.dtype, weight.device, thread_counts())
    if shape not in _PLANS:
        _PLANS[shape] = _prove(weight, bias)
    return _PLANS[shape]


def _prove(weight: Tensor, bias: Tensor | None) -> Plan:
    out, width = weight.shape
    rows = max(64, min(PROOF_ROWS, PROOF_ELEMENTS // out))
    x = random_rows(rows, width, weight.dtype, weight.device)
    for primitive, tile in CANDIDATES:
        if primitive == "packed" and not can_pack(weight):
            continue
        function = _rows_function(primitive, weight, bias)
        if place_does_not_matter(function, x if tile > 1 else x[:64], tile):
            return primitive, sizes_like(function, x, tile, SIZES)
    kind = f"{weight.dtype} on {weight.device}, threads {thread_counts()}"
    raise InputError(
        f"linear kernel tiled: expected invariant rows for a weight {list(weight.shape)}, {kind}, found none"
    )


def _run(function: Rows, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """x [..., in]: calls of the largest size that fits, then the smallest that holds the rest."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count in sizes and rows.data_ptr() % 64 == 0:  # a library may look at the alignment; torch allocates by 64
        return function(rows).view(*x.shape[:-1], -1)
    parts, start = [], 0
    while start < count:
        left = count - start
        size = next((s for s in sizes if s >= left), sizes[-1])
        if size > left and any(s <= left and 4 * s >= size for s in sizes):  # no more than a quarter a call is padding
            size = max(s for s in sizes if s <= left)
        part = rows.new_zeros(size, rows.shape[1])
        taken = min(size, left)
        part[:taken] = rows[start : start + taken]
        parts.append(function(part)[:taken])
        start += taken
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(*x.shape[:-1], -1)
