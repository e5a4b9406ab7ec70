"""The role table of an adapted checkpoint: neutral, random, or converted from a file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minimodel.bits import all_finite
from minimodel.errors import InputError, refuse
from minimodel.roles import ROLE_ROWS
from minimodel.safetensors_file import FILE_DTYPES, read_into, table_of_contents


def neutral_table(hidden_size: int, dtype: str) -> Tensor:
    """Returns [14, E] of -0.0. Adding a row changes no bit: x + (-0) is x, while x + (+0) turns -0 into +0."""
    return torch.full((ROLE_ROWS, hidden_size), -0.0, dtype=FILE_DTYPES[dtype], device="cpu")


def normal_table(hidden_size: int, dtype: str, std: float, seed: int) -> Tensor:
    """Returns [14, E], normal with mean 0, drawn in FP32 from a new generator and rounded once."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(ROLE_ROWS, hidden_size, generator=generator, dtype=torch.float32, device="cpu")
    return (table * std).to(FILE_DTYPES[dtype])


def converted_table(path: Path, hidden_size: int) -> Tensor:
    """Reads the table of a .safetensors file, or of a pickle with weights-only loading, in the file's dtype.

    The file holds one matrix, bare or under one name. InputError for anything else, fewer than 14 rows, another width,
    NaN or infinity.
    """
    table = _from_safetensors(path) if path.suffix == ".safetensors" else _from_pickle(path)
    if table.ndim != 2 or table.shape[1] != hidden_size or table.shape[0] < ROLE_ROWS:
        raise refuse(f"{path}: shape", f"[{ROLE_ROWS} or more, {hidden_size}]", list(table.shape))
    if table.dtype not in FILE_DTYPES.values():
        raise refuse(f"{path}: dtype", "BF16, F16, F32 or F64", table.dtype)
    if not all_finite(table):
        raise InputError(f"{path}: expected finite values, found NaN or infinity")
    return table


def write_table(path: Path, table: Tensor) -> None:
    """Writes `role_embedding.safetensors`: one tensor named weight."""
    save_file({"weight": table.contiguous()}, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _from_safetensors(path: Path) -> Tensor:
    entries = table_of_contents(path)
    if len(entries) != 1:
        raise refuse(f"{path}: tensors", "one", sorted(entries)[:4])
    (entry,) = entries.values()
    if entry.dtype not in FILE_DTYPES:
        raise refuse(f"{path}: dtype", "BF16, F16, F32 or F64", entry.dtype)
    table = torch.empty(entry.shape, dtype=FILE_DTYPES[entry.dtype], device="cpu")
    read_into(entry, table)
    return table


def _from_pickle(path: Path) -> Tensor:
    if not path.is_file():
        raise InputError(f"{path}: expected a role table, found {'a directory' if path.is_dir() else 'nothing'}")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)  # tensors and containers, no code
    except Exception as error:  # a damaged stream can raise anything
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path}: expected a pickle of one tensor, found something else ({reason})") from None
    if isinstance(held, Mapping) and len(held) == 1:
        (held,) = held.values()
    if not isinstance(held, Tensor):
        raise refuse(f"{path}: content", "one tensor, bare or under one name", type(held).__name__)
    return held.detach().clone()
