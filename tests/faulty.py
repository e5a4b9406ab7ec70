"""Faults at the decoder's entry: one wrong thing in one slot, in all copies or in one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from minimodel.decoder import Decoder

PARTS = {"token": 0, "role": 1, "position": 2, "mask": 3}


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
