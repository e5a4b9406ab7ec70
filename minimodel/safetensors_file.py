"""One safetensors file: its checked table of contents, reading a tensor into allocated memory, and writing it.

The `safetensors` library checks the file (header, ranges, total size). The bytes are then read with plain reads, in
parts that fit the processor's cache. Mapping the file instead would count every weight twice while it is copied.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minimodel.errors import InputError
from minimodel.files import parse_json, require_plain_file

FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
MAX_HEADER_BYTES = 8 * 1024 * 1024  # Qwen2.5-72B's has 0.1 MB; parsing the worst header takes fifty times its bytes
STAGE_BYTES = 1024 * 1024  # most bytes of one read


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    path: Path
    name: str  # in the file
    dtype: str  # as the file spells it, "BF16"
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    stop: int  # one past its last byte


def table_of_contents(path: Path) -> dict[str, TensorEntry]:
    """Returns the file's tensors by name. InputError for a file that is missing, cut, padded or otherwise damaged."""
    require_plain_file(path)
    try:
        with open(path, "rb") as file:
            (header_length,) = struct.unpack("<Q", file.read(8))
            if header_length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_length} bytes, more than {MAX_HEADER_BYTES}")
            text = file.read(header_length)
        with safe_open(path, framework="np") as opened:  # "np": for torch it maps the whole file as writable memory
            names = set(opened.keys())
        header = parse_json(text, "header")  # refuses a name that stands twice, where the library takes the last
    except MemoryError:
        size = path.stat().st_size
        raise InputError(f"{path}: expected {size} bytes of free memory or address space, found less") from None
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise InputError(f"{path}: incomplete or damaged ({' '.join(str(error).split())[:160]})") from None
    header.pop("__metadata__", None)
    assert set(header) == names, "the library and this reader find other tensors"
    found = {}
    for name, entry in header.items():
        start, stop = (8 + header_length + offset for offset in entry["data_offsets"])
        found[name] = TensorEntry(path, name, entry["dtype"], tuple(entry["shape"]), start, stop)
    return found


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replaces a file at once: a reader sees the old or the new one. OSError names the file that cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(tensors), part, metadata=dict(metadata))
        part.chmod(0o644)  # the library creates files for their owner alone
        os.replace(part, path)
    except SafetensorError as error:  # a full disk: "Error while serializing: I/O error: No space left on device ..."
        part.unlink(missing_ok=True)
        raise OSError(0, str(error).rpartition(": ")[2], str(path)) from None


def require_float(entry: TensorEntry) -> None:
    """InputError for a dtype that is not a plain float: FP8 and integers need a scheme that is not implemented."""
    if entry.dtype not in FILE_DTYPES:
        raise InputError(f"{entry.path}: tensor {entry.name}: expected BF16, F16, F32 or F64, found {entry.dtype}")


def read_into(entry: TensorEntry, target: Tensor) -> None:
    """Fills `target` (contiguous, the entry's shape) from the file; another dtype is converted as `Tensor.to` does.

    That rounds once, except F64 to BF16 or F16, which torch and so transformers round to FP32 first. InputError for a
    dtype that is not a plain float (FP8, integers) and for a file that ends early.
    """
    require_float(entry)
    assert tuple(target.shape) == entry.shape and target.is_contiguous(), f"{entry.name}: wrong place"
    flat = target.view(-1)
    for first, part in _parts(entry):
        flat[first : first + part.numel()].copy_(part)


def count_changed(entry: TensorEntry, dtype: torch.dtype) -> int:
    """Returns how many values of a tensor change when read as `dtype`. Reads the tensor unless none can change."""
    require_float(entry)
    both = torch.promote_types(FILE_DTYPES[entry.dtype], dtype)  # holds every value of both exactly
    if both == dtype:
        return 0
    return sum(int(part.to(dtype).to(both).ne(part.to(both)).sum()) for _, part in _parts(entry))


def _parts(entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first value, values in the file's dtype), at most STAGE_BYTES at a time."""
    dtype, count = FILE_DTYPES[entry.dtype], math.prod(entry.shape)
    step = STAGE_BYTES // dtype.itemsize
    try:
        with open(entry.path, "rb") as file:
            file.seek(entry.start)
            for first in range(0, count, step):
                wanted = min(step, count - first) * dtype.itemsize
                raw = np.fromfile(file, np.uint8, wanted)
                if len(raw) < wanted:
                    raise InputError(f"{entry.path}: incomplete or damaged (tensor {entry.name} ends early)")
                yield first, torch.from_numpy(raw).view(dtype)
    except OSError as error:
        raise InputError(f"{entry.path}: cannot be read ({error.strerror or error})") from None
