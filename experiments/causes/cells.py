"""The cells of the crossing: numeric contracts that differ in one thing at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from experiments.run.options import RunOptions
from minimodel.numerics import KERNELS, NumericContract

FACTORS = [("repeat_kv", "plain"), ("repeat_kv", "tiled"), ("blocked", "plain"), ("blocked", "tiled")]
VARIANTS = ["packed_gqa", "eager", "sdpa_fp32", "eager_softmax_model_dtype"]  # with the plain linear kernel
CELLS = ["/".join(pair) for pair in FACTORS] + [f"{attention}/plain" for attention in VARIANTS]
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Cell:
    """One numeric contract of the crossing."""

    dtype: str
    attention: str  # kernel
    linear: str  # kernel
    chunked: bool = field(default=False, compare=False)  # the drift of chunked prefill is measured too

    @property
    def kernels(self) -> str:
        return f"{self.attention}/{self.linear}"

    @property
    def name(self) -> str:
        return f"{self.dtype}/{self.kernels}"

    def numeric(self, options: RunOptions) -> NumericContract:
        return replace(options.numeric(self.dtype), kernels=self.kernels)

    @property
    def invariant(self) -> bool:
        return (self.attention, self.linear) == KERNELS["invariant"]


def cells(dtypes: Sequence[str]) -> list[Cell]:
    """Returns per dtype the four factor cells, then the variants. Default and invariant cell measure chunks."""
    found = []
    for dtype in dtypes:
        found += [Cell(dtype, *pair, chunked=pair in (FACTORS[0], FACTORS[3])) for pair in FACTORS]
        found += [Cell(dtype, attention, "plain") for attention in VARIANTS]
    return found
