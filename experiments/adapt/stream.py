"""Writes a safetensors file by streaming: a header, then bytes copied from other files through one bounded buffer.

`safetensors.torch.save_file` is not used, because it takes whole tensors: with mapped ones the peak of resident memory
grew by the file's size (511 MiB for 512 MiB), grown matrices cannot be mapped, and SHA-256 would need a second pass.
The library opens the file that is written here.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minimodel.errors import InputError
from minimodel.safetensors_file import FILE_DTYPES, TensorEntry

BUFFER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Span:
    """Bytes start to stop-1 of a file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Planned:
    """One tensor to write."""

    dtype: str  # as the file spells it
    shape: tuple[int, ...]
    spans: tuple[Span, ...]  # where its bytes come from, in order

    @classmethod
    def copied(cls, entry: TensorEntry) -> "Planned":
        """Returns the plan of an unchanged tensor."""
        return cls(entry.dtype, entry.shape, (Span(entry.path, entry.start, entry.stop),))

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)


def with_rows(entry: TensorEntry, rows: int, sources: Mapping[int, int]) -> Planned:
    """Returns the plan of a matrix [V, E] grown to `rows` >= V rows, where row k copies the base's row sources[k].

    Rows without a source keep their bytes; every row beyond V needs one. Rows are copied as ranges of bytes.
    """
    count = entry.shape[0]
    assert rows >= count and all(k in sources for k in range(count, rows)), "a new row without a source"
    width = (entry.stop - entry.start) // count

    def row_bytes(first: int, last: int) -> Span:
        return Span(entry.path, entry.start + first * width, entry.start + last * width)

    spans, kept = [], 0
    for row in sorted(sources):
        if kept < min(row, count):
            spans.append(row_bytes(kept, min(row, count)))
        spans.append(row_bytes(sources[row], sources[row] + 1))
        kept = row + 1
    if kept < count:
        spans.append(row_bytes(kept, count))
    return Planned(entry.dtype, (rows, *entry.shape[1:]), tuple(spans))


def plan_bytes(tensors: Mapping[str, Planned]) -> int:
    """Returns the size of the file that `write_stream` writes."""
    header, order = _header(tensors)
    return len(header) + sum(len(tensors[name]) for name in order)


def write_stream(path: Path, tensors: Mapping[str, Planned]) -> str:
    """Writes the file and returns its SHA-256. InputError where a source file ends early."""
    header, order = _header(tensors)
    digest = hashlib.sha256(header)
    with open(path, "wb") as out:
        out.write(header)
        for name in order:
            for chunk in _chunks(tensors[name].spans):
                digest.update(chunk)
                out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _header(tensors: Mapping[str, Planned]) -> tuple[bytes, list[str]]:
    """Returns the length-prefixed header, padded to eight bytes, and the order of the data: wide dtypes first, so that
    every tensor starts at a multiple of its element's size."""
    order = sorted(tensors, key=lambda name: -FILE_DTYPES[tensors[name].dtype].itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        planned = tensors[name]
        table[name] = {
            "dtype": planned.dtype,
            "shape": list(planned.shape),
            "data_offsets": [offset, offset + len(planned)],
        }
        offset += len(planned)
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _chunks(spans: Sequence[Span]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for span in spans:
        with open(span.path, "rb", buffering=0) as file:
            file.seek(span.start)
            left = len(span)
            while left:
                count = file.readinto(buffer[: min(left, BUFFER_BYTES)])
                if not count:
                    raise InputError(f"{span.path}: incomplete or damaged (ends {left} bytes early)")
                yield buffer[:count]
                left -= count
