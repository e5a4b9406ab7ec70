"""Linear in oneDNN's own weight layout: the reordering that F.linear does in every call is done once, at load.

In BF16 and FP16 the packed call is used only for row counts at which a check found F.linear's bits: 2 rows may pass
where 1 row takes another path in the library. At any other row count the weight is unpacked and F.linear is called. In
FP32 the packed call sums in another order than F.linear. So FP32 `packed` has other bits than `plain`: it is never the
default, is recorded by name, and makes the packed call at every row count.

Only the packed copy is kept, unless something else refers to the plain one, as the embedding does to a tied head.

Projections that read one input (q, k, v; gate, up) are packed as one weight, their rows joined: at two rows a call
takes about the same time whatever its width. The check compares the joined product with F.linear of each projection.

oneDNN keeps code and buffers, some MB per shape, for every row count that it was ever called with. So loading tries
only the row counts of one request; `decode.independence` tries those of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import same_bits
from minimodel.errors import InputError, refuse
from minimodel.invariant.checks import thread_counts, threads, trial

ONE_REQUEST = (1, 2)  # row counts of a step of one request: one physical copy or two
ROW_COUNTS = (*range(1, 9), *range(10, 33, 2))  # those of up to 16 requests too; with more rows packing gains little
FEATURES = {  # what oneDNN packs, and the CPU features that it requires for that
    torch.bfloat16: "avx_ne_convert, or avx512bw with avx512vl and avx512dq",
    torch.float16: "avx512_fp16 or avx_ne_convert",
    torch.float32: "",
}
_EQUAL: dict[tuple[object, ...], bool] = {}  # checks made, by shape, threads and row count: values do not matter


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


@dataclass(frozen=True)
class Packed:
    """Projections that read one input, as one packed weight of their joined rows."""

    run: PackedWeight  # [n, in] -> [n, sum of widths]
    widths: tuple[int, ...]  # outputs of each projection
    counts: tuple[int, ...] | None  # row counts at which the packed call is used; None: at all

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self.counts is None or x.numel() // x.shape[-1] in self.counts:
            outs: Sequence[Tensor] = self.run(x).split(self.widths, dim=-1)
            return outs
        return linear_of_each(x, self.run.weight(), self.run.bias, self.widths)


def packed(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Packed | None:
    """Returns projections (weight [out_i, in], bias [out_i], all or none with a bias) packed as one.

    Returns None where no row count of one request has F.linear's bits. InputError for a dtype or device that oneDNN
    cannot pack, and for a weight that trains.
    """
    biases = [bias for _, bias in parts if bias is not None]
    assert len(biases) in (0, len(parts)), "projections with and without a bias are not joined"
    for weight, _ in parts:
        if reason := why_not_packed(weight.dtype, weight.device):
            raise InputError(f"linear kernel packed: {reason}; use --linear plain")
        if weight.requires_grad:
            raise refuse("linear kernel packed", "a weight that does not train", f"{weight.dtype}, training")
    widths = tuple(weight.shape[0] for weight, _ in parts)
    # a single weight is not copied: it may be the largest of the model
    weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])  # [sum of widths, in]
    bias = torch.cat(biases) if biases else None  # [sum of widths]
    counts = None if weight.dtype == torch.float32 else equal_counts(weight, bias, widths, ONE_REQUEST)
    return None if counts == () else Packed(PackedWeight(weight, bias), widths, counts)


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


def equal_counts(
    weight: Tensor, bias: Tensor | None, widths: tuple[int, ...], counts: Sequence[int] = ROW_COUNTS
) -> tuple[int, ...]:
    """Returns those of `counts` at which the packed call has F.linear's bits under every thread count.

    widths: rows of each projection joined in `weight`; F.linear is called for each of them.
    """
    shape = (widths, weight.shape[1], bias is None, weight.dtype, thread_counts())
    if unknown := [n for n in counts if (*shape, n) not in _EQUAL]:
        x, weight, bias = trial(weight, bias, max(counts))
        run = PackedWeight(weight, bias)
        for n in unknown:
            _EQUAL[(*shape, n)] = True
            for count in thread_counts():
                with threads(count):
                    plain = torch.cat(linear_of_each(x[:n], weight, bias, widths), -1)  # [n, sum of widths]
                    _EQUAL[(*shape, n)] &= same_bits(run(x[:n]), plain)
    return tuple(n for n in counts if _EQUAL[(*shape, n)])


def linear_of_each(x: Tensor, weight: Tensor, bias: Tensor | None, widths: tuple[int, ...]) -> list[Tensor]:
    """Returns F.linear of each projection whose rows are joined in `weight`: x [..., in] -> one [..., width] each."""
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    return [F.linear(x, rows, each) for rows, each in zip(weight.split(widths), biases)]
