"""Linear with oneDNN's own weight layout: the reordering that F.linear does in every call is done once, at load.

In BF16 and FP16 the packed call is used only for numbers of rows for which it has been proven to give F.linear's bits;
a larger call unpacks the weight and calls F.linear. In FP32 the packed call sums in another order: there, `packed` is a
contract of its own (never the default), used for every call. The packed copy takes the weight's place; whoever still
holds the plain one (a tied embedding) keeps that too, so a tied head costs a second copy of the table.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.errors import InputError, refuse
from minimodel.numbers import same_bits
from minimodel.proof import Rows, random_rows, thread_counts, threads

FEW_ROWS = 32  # beyond, oneDNN may take another path, and packing gains little
PROOF_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 31, 32)
_EQUAL: dict[tuple[object, ...], bool] = {}  # by shape: an order of sums does not depend on the numbers


def packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight [out, in], bias [out] or None -> [..., in] -> [..., out]; see the module for which bits.

    A narrow weight that fails its proof is left to F.linear. InputError for a dtype or device that oneDNN cannot pack,
    and for a weight that trains.
    """
    if not can_pack(weight):
        found = f"{weight.dtype} on {weight.device}{', training' if weight.requires_grad else ''}"
        raise refuse("linear kernel packed", "BF16, FP16 or FP32 weights on the CPU that do not train", found)
    run = pack(weight, bias)
    if weight.dtype == torch.float32:
        return partial(_all_rows, run)
    if not (_proven(weight, bias, run) and _equal(weight, bias, run, (2,), (torch.get_num_threads(),))):
        return partial(F.linear, weight=weight, bias=bias)
    return partial(_few_rows, run)


def can_pack(weight: Tensor) -> bool:
    """oneDNN packs BF16, FP16 and FP32 on the CPU; what trains must stay as it is."""
    narrow = (torch.bfloat16, torch.float16, torch.float32)
    return weight.device.type == "cpu" and weight.dtype in narrow and not weight.requires_grad and _has_mkldnn()


def _has_mkldnn() -> bool:
    return torch.backends.mkldnn.is_available()


class pack:  # noqa: N801
    """A packed weight as a function of rows [n, in] -> [n, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: Tensor) -> Tensor:
        return self._call(rows, self.packed, self.bias, "none", [], "")

    def weight(self) -> Tensor:
        """The plain weight [out, in] again, bit for bit: a reordering loses nothing."""
        return self.packed.to_dense()


def _all_rows(run: "pack", x: Tensor) -> Tensor:
    return run(x)


def _few_rows(run: "pack", x: Tensor) -> Tensor:
    if x.numel() <= FEW_ROWS * x.shape[-1]:
        return run(x)
    return F.linear(x, run.weight(), run.bias)


def _proven(weight: Tensor, bias: Tensor | None, run: Rows) -> bool:
    shape = (tuple(weight.shape), bias is None, weight.dtype, thread_counts())
    if shape not in _EQUAL:
        _EQUAL[shape] = _equal(weight, bias, run, PROOF_ROWS, thread_counts())
    return _EQUAL[shape]


def _equal(
    weight: Tensor, bias: Tensor | None, run: Rows, row_counts: tuple[int, ...], counts: tuple[int, ...]
) -> bool:
    x = random_rows(FEW_ROWS, weight.shape[1], weight.dtype, weight.device)
    for count in counts:
        with threads(count):
            if not all(same_bits(run(x[:rows]), F.linear(x[:rows], weight, bias)) for rows in row_counts):
                return False
    return True


__all__ = ["InputError", "can_pack", "pack", "packed"]
