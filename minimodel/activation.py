"""SiLU, by the name of the linear kernel whose rows it must not spoil."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Silu = Callable[[Tensor], Tensor]


def silu_in_steps(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), with the same bits for an element wherever it lies.

    torch's FP32 and FP64 SiLU on the CPU takes one exponential in full vectors and another for what is left over at the
    end of a thread's share, so an element's bits depend on the number of rows and threads. The single steps do not
    have that fault. In BF16 and FP16 torch's SiLU is the same function in both places, for every one of the 65,536
    numbers there are (a test tries them all), and is used as it is.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return F.silu(x)
    return x / (1 + torch.exp(-x))


SILU_KERNELS: dict[str, Silu] = {"plain": F.silu, "packed": F.silu, "tiled": silu_in_steps}
