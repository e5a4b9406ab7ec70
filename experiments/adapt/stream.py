"""Writes a safetensors file by streaming: a header, then bytes copied from other files through one bounded buffer.

`safetensors.torch.save_file` is not used, because it takes whole tensors: with mapped ones the peak of resident memory
grew by the file's size (511 MiB for 512 MiB), grown matrices cannot be mapped, and SHA-256 would need a second pass.
The library opens the file that is written here.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimodel.errors import InputError
from minimodel.safetensors_file import FILE_DTYPES, TensorEntry

BUFFER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Planned:
    """One tensor to write."""

    dtype: str  # as the file spells it
    shape: tuple[int, ...]
    spans: tuple[tuple[Path, int, int], ...]  # (file, first byte, byte after the last) of its bytes, in order

    @classmethod
    def copied(cls, entry: TensorEntry) -> "Planned":
        """Returns the plan of an unchanged tensor."""
        return cls(entry.dtype, entry.shape, ((entry.path, entry.start, entry.stop),))

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.spans)


def with_rows(entry: TensorEntry, rows: int, sources: Mapping[int, int]) -> Planned:
    """Returns the plan of a matrix [V, E] grown to `rows` >= V rows, where row k copies the base's row sources[k].

    Rows without a source keep their bytes; every row beyond V needs one. Rows are copied as ranges of bytes.
    """
    count = entry.shape[0]
    assert rows >= count and all(k in sources for k in range(count, rows)), "a new row without a source"
    width = (entry.stop - entry.start) // count
    runs: list[list[int]] = []  # [first row of the base, row after the last]
    for row in (sources.get(k, k) for k in range(rows)):
        if runs and runs[-1][1] == row:
            runs[-1][1] += 1
        else:
            runs.append([row, row + 1])
    spans = tuple((entry.path, entry.start + a * width, entry.start + b * width) for a, b in runs)
    return Planned(entry.dtype, (rows, *entry.shape[1:]), spans)


def plan_bytes(tensors: Mapping[str, Planned]) -> int:
    """Returns the size of the file that `write_stream` writes."""
    return len(_header(tensors)[0]) + sum(map(len, tensors.values()))


def write_stream(path: Path, tensors: Mapping[str, Planned]) -> str:
    """Writes the file and returns its SHA-256. InputError where a source file ends early."""
    header, order = _header(tensors)
    digest = hashlib.sha256(header)
    with open(path, "wb") as out:
        out.write(header)
        for source, start, stop in (span for name in order for span in tensors[name].spans):
            with open(source, "rb", buffering=0) as file:
                file.seek(start)
                while left := stop - file.tell():
                    chunk = file.read(min(left, BUFFER_BYTES))
                    if not chunk:
                        raise InputError(f"{source}: incomplete or damaged (ends {left} bytes early)")
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _header(tensors: Mapping[str, Planned]) -> tuple[bytes, list[str]]:
    """Returns the length-prefixed header, padded to eight bytes, and the order of the data: wide dtypes first, so that
    every tensor starts at a multiple of its element's size."""
    order = sorted(tensors, key=lambda name: -FILE_DTYPES[tensors[name].dtype].itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        one, start = tensors[name], offset
        offset += len(one)
        table[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [start, offset]}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order
