"""The batch-invariant linear kernel: rows are computed in calls of fixed sizes.

A library picks the order of a row's sums by the number of rows in the call and, with several threads, by the row's
place. So rows are computed in tiles of a fixed number of rows, the last one padded with zero rows. A tile size is used
only where `checks.place_does_not_matter` holds for it. Other sizes, those of SIZES, are used too where they give the
tile's bits: a larger one is faster for a long call, a smaller one for a short call.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.errors import InputError
from minimodel.invariant.checks import Rows, in_tiles, place_does_not_matter, thread_counts, threads, trial
from minimodel.packed import PackedWeight, why_not_packed

# (primitive, rows of a tile) in order of preference: a packed product of 32 rows takes little longer than one of 2
CANDIDATES = (("packed", 32), ("plain", 32), ("plain", 8), ("plain", 1))
SIZES = (2, 8, 32, 128, 512)
FEW_ROWS = 32  # the largest tile: more rows than this fill at least one call of some size
CHECK_ROWS = (512, 128, 64)  # rows of a check: the first for which rows x weights is within CHECK_PRODUCTS, or the last
CHECK_PRODUCTS = 1 << 30

Plan = tuple[str, tuple[int, ...]]  # the primitive, and the call sizes that have the tile's bits, ascending
_PLANS: dict[tuple[object, ...], Plan] = {}  # checks made, by shape and threads: values do not matter


def tiled(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Returns the function of some projections (weight [out, in], bias [out] or None) in which each row of the input
    gets the same bits whatever the call's other rows.

    InputError names the shape where no candidate passes its check on this device.
    """
    runs = []
    for weight, bias in parts:
        shape = (tuple(weight.shape), bias is None, weight.dtype, weight.device, thread_counts())
        if shape not in _PLANS:
            _PLANS[shape] = _checked_plan(weight, bias)
        primitive, sizes = _PLANS[shape]
        runs.append(partial(_run, _rows_function(primitive, weight, bias), sizes))
    return lambda x: [run(x) for run in runs]


def _rows_function(primitive: str, weight: Tensor, bias: Tensor | None) -> Rows:
    return PackedWeight(weight, bias) if primitive == "packed" else partial(F.linear, weight=weight, bias=bias)


def _checked_plan(weight: Tensor, bias: Tensor | None) -> Plan:
    rows = next((n for n in CHECK_ROWS if n * weight.numel() <= CHECK_PRODUCTS), CHECK_ROWS[-1])
    x, weight, bias = trial(weight, bias, rows)
    for primitive, tile in CANDIDATES:
        if primitive == "packed" and why_not_packed(weight.dtype, weight.device):
            continue
        function = _rows_function(primitive, weight, bias)
        with threads(1):
            expected = in_tiles(function, x if tile > 1 else x[:64], tile)
        if place_does_not_matter(function, x[: len(expected)], tile, expected):
            others = (size for size in SIZES if size <= len(expected) and size != tile)
            like = [size for size in others if place_does_not_matter(function, x[: len(expected)], size, expected)]
            return primitive, tuple(sorted([tile, *like]))
    kind = f"{weight.dtype} on {weight.device}, threads {thread_counts()}"
    raise InputError(
        f"linear kernel tiled: expected invariant rows for a weight {list(weight.shape)}, {kind}, found none; "
        "use --linear plain"
    )


def _run(function: Rows, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """Returns function(x [..., in]) from calls of `sizes`.

    Up to FEW_ROWS rows are one call of the smallest size that holds them, padded with zero rows. More rows are cut into
    calls of the largest size that they fill.
    """
    rows = x.reshape(-1, x.shape[-1])  # [n, in]
    count = rows.shape[0]
    # at a size, without a copy, if aligned as torch allocates (64 bytes): a library may take another path otherwise
    if count in sizes and rows.data_ptr() % 64 == 0:
        return function(rows).view(*x.shape[:-1], -1)  # [..., out]
    parts, start = [], 0
    while start < count:
        left = count - start
        if left > FEW_ROWS:
            size = max(size for size in sizes if size <= left)
        else:
            size = min((size for size in sizes if size >= left), default=sizes[-1])
        part = rows.new_zeros(size, rows.shape[1])  # [size, in]
        taken = min(size, left)
        part[:taken] = rows[start : start + taken]
        parts.append(function(part)[:taken])
        start += taken
    return torch.cat(parts).view(*x.shape[:-1], -1)  # [..., out]
