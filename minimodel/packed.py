"""Linear in oneDNN's own weight layout: the reordering that F.linear does in every call is done once, at load.

In BF16 and FP16 the packed call is used only for numbers of rows for which a check found F.linear's bits (2 rows, say,
where 1 row takes another path). Any other call unpacks the weight and calls F.linear. In FP32 the packed call sums in
another order: there, `packed` is a contract of its own (never the default), used for every call. The packed copy takes
the weight's place. If another reference exists (tied embedding), both copies stay.

Maps of one input (q, k, v; gate, up) are packed as one weight, rows below rows: at two rows a call costs much the same
whatever its width. The check then compares the one product with F.linear of each map alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import same_bits
from minimodel.errors import InputError, refuse
from minimodel.invariant.checks import cancelling, thread_counts, threads

Part = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]
ROW_COUNTS = (*range(1, 9), *range(10, 33, 2))  # tried: 2 rows a request; with more rows packing gains little
LARGE = 1 << 24  # weights of more elements are not made twice
FEATURES = {  # what oneDNN packs, and the CPU features that it requires for that
    torch.bfloat16: "avx_ne_convert, or avx512bw with avx512vl and avx512dq",
    torch.float16: "avx512_fp16 or avx_ne_convert",
    torch.float32: "",
}
_EQUAL: dict[tuple[object, ...], tuple[int, ...]] = {}  # by shape: the numbers in a weight do not matter


def packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight [out, in], bias [out] or None -> a map [..., in] -> [..., out]; see the module for which bits.

    A narrow weight whose check fails for every number of rows is left to F.linear. InputError for a dtype or device
    that oneDNN cannot pack, and for a weight that trains.
    """
    if reason := why_not_packed(weight.dtype, weight.device):
        raise InputError(f"linear kernel packed: {reason}; use --linear plain")
    if weight.requires_grad:
        raise refuse("linear kernel packed", "a weight that does not train", f"{weight.dtype}, training")
    joined = _joined(weight, bias, (weight.shape[0],))
    return partial(F.linear, weight=weight, bias=bias) if joined is None else partial(_only, joined)


def packed_together(parts: Sequence[Part]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Several maps of one input as one product: (weight [out_i, in], bias [out_i] or None in all) -> [..., out_i] each.

    The outputs are views of one tensor. Where the check fails for every number of rows, and for weights that cannot be
    packed, each map is taken alone, as `packed` says.
    """
    biases = [bias for _, bias in parts if bias is not None]
    assert len(biases) in (0, len(parts)), "maps with and without a bias are not joined"
    joined = None
    if all(can_pack(weight) for weight, _ in parts):
        widths = tuple(weight.shape[0] for weight, _ in parts)
        joined = _joined(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None, widths)
    return OneByOne([packed(weight, bias) for weight, bias in parts]) if joined is None else joined


@dataclass(frozen=True)
class PackedMaps:
    """Maps of one input as one packed weight, the rows of each map below those of the map before."""

    run: "PackedWeight"
    widths: tuple[int, ...]  # outputs of each map
    counts: tuple[int, ...] | None  # numbers of rows for which the packed call is used; None: all

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self.counts is None or x.numel() // x.shape[-1] in self.counts:
            maps: Sequence[Tensor] = self.run(x).split(self.widths, dim=-1)
            return maps
        return _apart(x, self.run.weight(), self.run.bias, self.widths)


def _joined(weight: Tensor, bias: Tensor | None, widths: tuple[int, ...]) -> PackedMaps | None:
    """Packs a weight; None where the packed call has F.linear's bits for no number of rows, in FP32 always packed."""
    counts = None if weight.dtype == torch.float32 else _equal_counts(weight, bias, widths)
    return None if counts == () else PackedMaps(PackedWeight(weight, bias), widths, counts)


def _only(maps: PackedMaps, x: Tensor) -> Tensor:
    return maps(x)[0]


class OneByOne:
    """Each of several maps on the same input."""

    def __init__(self, maps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.maps = maps

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return [each(x) for each in self.maps]


def can_pack(weight: Tensor) -> bool:
    """Returns whether oneDNN packs this weight here; what trains must stay as it is."""
    return not weight.requires_grad and not why_not_packed(weight.dtype, weight.device)


def why_not_packed(dtype: torch.dtype, device: torch.device) -> str:
    """Returns why weights of this dtype cannot be packed on this device, in one phrase; empty where they can."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu" or dtype not in FEATURES:
        return f"expected BF16, FP16 or FP32 weights on the CPU, found {name} on {device}"
    if packing_works(dtype):
        return ""
    needed = f"oneDNN and a CPU with {FEATURES[dtype]}" if FEATURES[dtype] else "oneDNN"
    return f"expected {needed} to pack {name} weights, found that this process cannot pack them"


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Tries once per process whether a small weight of this dtype can be packed, multiplied and unpacked.

    The trial decides, not a list of CPU features: ONEDNN_MAX_CPU_ISA can hide features of the CPU from oneDNN.
    """
    weight = torch.eye(16, dtype=dtype, device="cpu")
    try:
        run = PackedWeight(weight, None)
        return same_bits(run(weight), weight) and same_bits(run.weight(), weight)
    except RuntimeError:  # oneDNN's refusal, or a torch built without it
        return False


class PackedWeight:
    """A packed weight, called with rows [n, in] -> [n, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: Tensor) -> Tensor:
        out: Tensor = self._call(rows, self.packed, self.bias, "none", [], "")
        return out

    def weight(self) -> Tensor:
        """Returns the plain weight [out, in] bit for bit: reordering loses nothing."""
        plain: Tensor = self.packed.to_dense()
        return plain


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, widths: tuple[int, ...]) -> list[Tensor]:
    """F.linear of each of the maps whose rows are joined in `weight`."""
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    return [F.linear(x, rows, each) for rows, each in zip(weight.split(widths), biases)]


def _equal_counts(weight: Tensor, bias: Tensor | None, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the row counts at which both calls give the same bits, under every thread count.

    widths: rows of each map joined in `weight`, which F.linear takes apart.
    """
    shape = (widths, weight.shape[1], bias is None, weight.dtype, thread_counts())
    if shape not in _EQUAL:
        x, weight, bias = trial(weight, bias, ROW_COUNTS[-1])
        run, good = PackedWeight(weight, bias), set(ROW_COUNTS)
        for count in thread_counts():
            with threads(count):
                good = {n for n in good if same_bits(run(x[:n]), torch.cat(_apart(x[:n], weight, bias, widths), -1))}
        _EQUAL[shape] = tuple(sorted(good))
    return _EQUAL[shape]


def equal_row_counts(weights: Sequence[tuple[Tensor, tuple[int, ...]]]) -> tuple[int, ...]:
    """Returns the row counts, of `ROW_COUNTS`, at which every weight [out, in] packed has F.linear's bits.

    Each weight comes with the widths of the maps that are joined in it, one map: its own width.
    """
    found = set(ROW_COUNTS)
    for weight, widths in weights:
        found &= set(_equal_counts(weight, None, widths))
    return tuple(sorted(found))


def trial(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what a check of this weight's shape runs on: rows x, a weight, and zeros for the bias if there is one.

    A very large weight stands for itself, so that no second one is made: its outputs are so many that even ordinary
    rows show a difference in some of them.
    """
    out, width = weight.shape
    large = weight.numel() > LARGE
    x, made = cancelling(rows, width, 2 if large else out, weight.dtype, weight.device)
    return x, weight.detach() if large else made, None if bias is None else torch.zeros_like(bias)
