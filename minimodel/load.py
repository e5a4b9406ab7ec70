"""From a checkpoint directory to a running decoder."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minimodel.bits import all_finite
from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.numerics import KERNELS, NumericContract
from minimodel.placement import place_of, placement
from minimodel.safetensors_file import TensorEntry, read_into
from minimodel.selfcheck import require_invariant, require_usable


def load_model(directory: str | Path, numeric: NumericContract, copies: int = 2) -> Decoder:
    """Opens, checks and reads a checkpoint, tensor by tensor straight into place, and puts `numeric` in force.

    Peak memory: the weights in the model dtype plus a staging buffer of 1 MiB; a kernel that packs its weights adds
    those of one product at a time, and a second copy of a tied embedding. Two equal copies are then checked to keep
    equal bits on this device (`selfcheck`), which holds one random layer and a head meanwhile; `copies` 1 skips it. A
    directory without role table and contract.json gives a stock decoder (`roles=None`, causal mask). InputError says in
    one line what does not fit.
    """
    numeric.apply()
    checkpoint = open_checkpoint(directory)
    decoder = decoder_from(checkpoint, numeric)  # first: where memory is short, the tensor that does not fit is named
    if copies > 1:
        require_usable(numeric, checkpoint.config)
    return decoder


def decoder_from(checkpoint: Checkpoint, numeric: NumericContract) -> Decoder:
    """Reads the tensors of an opened checkpoint. InputError names a tensor that holds NaN or infinity, or a file that
    changed since it was opened.
    """
    if (numeric.attention, numeric.linear) == KERNELS["invariant"]:
        require_invariant(numeric, checkpoint.config)
    decoder = Decoder(checkpoint.config, _Reader(checkpoint, numeric), numeric, checkpoint.rules)
    checkpoint.require_unchanged()
    return decoder


class _Reader(Mapping[str, Tensor]):
    """Weights by name, each read on access and not kept: one that a kernel packs is freed before the next is read."""

    def __init__(self, checkpoint: Checkpoint, numeric: NumericContract) -> None:
        self._entries, self._dtype = checkpoint.tensors, numeric.torch_dtype
        self._changed = checkpoint.changed
        self._places = placement(numeric.device, checkpoint.config.num_hidden_layers)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        weight = _allocated(entry, self._dtype, place_of(name, self._places))
        self._changed[name, self._dtype] = read_into(entry, weight)
        if not all_finite(weight):
            raise InputError(f"{entry.path}: tensor {entry.name}: expected finite values, found NaN or infinity")
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _allocated(entry: TensorEntry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates one tensor in the model dtype; a sparse file can claim more memory than any machine has."""
    try:
        return torch.empty(entry.shape, dtype=dtype, device=device)
    except RuntimeError:  # torch's name for an allocation that failed, on any device
        size = math.prod(entry.shape) * dtype.itemsize
        raise InputError(
            f"{entry.path}: tensor {entry.name}: expected {size} bytes of free memory, found less"
        ) from None
