"""Small tools that tests of several packages share."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache import Boundary
from minimodel.bits import bits, same_bits
from minimodel.decoder import Decoder
from minimodel.errors import InputError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]  # narrow, narrow, wide, wide


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """The block must raise InputError, in one line that holds every one of `parts`."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000, f"not one line: {message!r}"
    for part in parts:
        assert part in message, f"{part!r} is missing in {message!r}"


def flip_bit(tensor: Tensor, index: tuple[int, ...]) -> None:
    """Flips the lowest bit of one element in place: the smallest difference there is."""
    bits(tensor)[index] ^= 1


def equal(left: Boundary, right: Boundary) -> bool:
    """Whether the caches and logits of two boundaries have the same bits."""
    return left.cache.equals(right.cache) and same_bits(left.logits, right.logits)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_lines(path: Path, *lines: Any) -> Path:
    """Writes one line per value: text and bytes as they are, everything else as JSON. Returns the path."""
    path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
    return path


def _line(value: Any) -> bytes:
    return value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()


def wait_until(condition: Callable[[], Any], alive: Callable[[], Any] = lambda: True) -> None:
    """Waits until `condition` holds, at most ten minutes and only while what is waited for is `alive`."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline and alive(), "what is waited for does not come"
        time.sleep(0.01)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object in a file; a value of `...` removes the key."""
    raw = {**read_json(path), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def edit_tensors(path: Path, **changes: Any) -> dict[str, Tensor]:
    """Sets tensors of a safetensors file; a value of `...` removes the tensor. Returns what the file then holds."""
    tensors = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not ...}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


PARTS = {"token": 0, "role": 1, "position": 2, "mask": 3}  # of a decoder's arguments


@contextmanager
def entering(model: Decoder, part: str, slot: int, copies: slice = slice(None), calls: str = "all") -> Iterator[None]:
    """Every call of `model` that covers `slot` gets another token, role, position or mask entry there.

    calls: "all", or only those of "one" token or of "many".
    """
    own = type(model).__call__

    def faulty(decoder: Decoder, *given: Any, **named: Any) -> Tensor:
        length, held = given[0].shape[1], len(given[4])
        wanted = calls == "all" or (calls == "one") == (length == 1)
        if decoder is not model or not wanted or not held <= slot < held + length:
            return own(decoder, *given, **named)
        changed = [None if tensor is None else tensor.clone() for tensor in given[:4]]
        target = changed[PARTS[part]]
        if part == "mask":
            target[copies, 0, slot - held, slot - 1] ^= True
        elif part == "role":
            target[copies, slot - held] = (target[copies, slot - held] + 1) % 6
        else:
            target[copies, slot - held] += 1
        return own(decoder, *changed, *given[4:], **named)

    with patch.object(type(model), "__call__", faulty):
        yield
