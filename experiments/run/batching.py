"""How many rows a run decodes together: what keeps every bit on this machine, and what its memory holds."""

from dataclasses import dataclass
from pathlib import Path

import torch

from decode.independence import LARGEST, together_here
from minimodel.bits import COPIES
from minimodel.decoder import Decoder
from minimodel.errors import InputError

CACHES = 7  # of one row at its fullest: the six boundaries of a transplant row, and the suffix decoder's working copy


@dataclass(frozen=True)
class Batch:
    """Rows decoded together."""

    size: int
    together: Decoder  # what takes their common steps
    text: str  # how many, and why; one line


def batch_size(model: Decoder, asked: int | None, rows: int, longest: int) -> Batch:
    """As many rows as asked for, or at most 16 of the `rows` left. A row's caches hold up to `longest` tokens.

    InputError when so many were asked for and they would not keep the bits they have alone, or not fit into memory.
    """
    if asked == 1 or rows == 1:
        return Batch(1, model, "1 row at a time: " + ("as asked for" if asked == 1 else "one is left"))
    wanted = LARGEST if asked is None else asked
    found = together_here(model, wanted)
    fitting, memory = _fitting(model, longest)
    if asked is not None and min(found.size, fitting) < asked:
        why = f"{found.limit}: other bits than alone" if found.size < asked else memory
        raise InputError(f"--batch-size: expected at most {min(found.size, fitting)} here ({why}), found {asked}")
    size = max(1, min(wanted, found.size, fitting))
    why = f"every part of a step was checked to keep its bits up to {2 * found.size} rows of the batch"
    if found.size < wanted:
        why = f"{found.limit} of the batch: other bits than alone"
    return Batch(size, found.model, f"{size} rows at a time: {memory if size < found.size else why}")


def _fitting(model: Decoder, longest: int) -> tuple[int, str]:
    """The rows whose caches fit into the memory that is free now, and a text that says so."""
    config = model.config
    entries = 2 * config.num_hidden_layers * COPIES * config.num_key_value_heads * longest * config.head_dim
    row = CACHES * entries * model.numeric.torch_dtype.itemsize
    free = free_bytes(model.numeric.torch_device)
    if free is None:
        return 1 << 30, ""
    return free // row, f"a row's caches take up to {row} bytes, and {free} are free"


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["MemAvailable"].split()[0]) << 10 if "MemAvailable" in found else None
