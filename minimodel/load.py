"""From a checkpoint directory to a running decoder: each part's device, and reading tensors straight into place."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minimodel.bits import all_finite
from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError, refuse
from minimodel.numerics import NumericContract
from minimodel.safetensors_file import read_into
from minimodel.selfcheck import require_invariant, require_usable


def load_model(directory: str | Path, numeric: NumericContract, copies: int = 2) -> Decoder:
    """Returns the decoder of a checkpoint directory and puts `numeric` in force.

    A directory without role table and contract.json gives a stock decoder (`roles=None`, causal mask). The load also
    checks that two equal copies keep equal bits on this device (`selfcheck`); `copies` 1 skips that. InputError says in
    one line what does not fit.

    Peak memory: the weights in the model dtype and a buffer of 1 MiB. A kernel that packs its weights adds those of one
    product at a time, and a second copy of a tied embedding. The check then adds one random layer and a head.
    """
    numeric.apply()
    checkpoint = open_checkpoint(directory)
    decoder = decoder_from(checkpoint, numeric)  # before the check: where memory is short, this names the tensor
    if copies > 1:
        require_usable(numeric, checkpoint.config)
    return decoder


def decoder_from(checkpoint: Checkpoint, numeric: NumericContract) -> Decoder:
    """Returns the decoder of an opened checkpoint. InputError names a tensor that holds NaN or infinity, or a file that
    changed since it was opened.
    """
    require_invariant(numeric, checkpoint.config)
    decoder = Decoder(checkpoint.config, _Reader(checkpoint, numeric), numeric, checkpoint.rules)
    checkpoint.require_unchanged()
    return decoder


def placement(device: str, layers: int) -> list[torch.device]:
    """Returns each layer's device: consecutive layers in order over the devices, as evenly as possible.

    The embedding is on the first layer's device, final norm and head on the last's. InputError for more devices than
    layers.
    """
    devices = [torch.device(name) for name in device.split(",")]
    if len(devices) > layers:
        raise refuse("devices", f"at most one for each of {layers} layers", device)
    return [devices[layer * len(devices) // layers] for layer in range(layers)]


def device_of(name: str, devices: Sequence[torch.device]) -> torch.device:
    """Returns the device of a checkpoint tensor, given the layers' devices."""
    if name.startswith("model.layers."):
        return devices[int(name.split(".")[2])]
    return devices[-1] if name in ("model.norm.weight", "lm_head.weight") else devices[0]


class _Reader(Mapping[str, Tensor]):
    """Weights by name, each read on access and not kept here: one that a kernel packs is freed before the next is read.

    A weight is read straight into its device and the model dtype: the one rounding between file and model.
    """

    def __init__(self, checkpoint: Checkpoint, numeric: NumericContract) -> None:
        self._entries, self._dtype = checkpoint.tensors, numeric.torch_dtype
        self._devices = placement(numeric.device, checkpoint.config.num_hidden_layers)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        where = f"{entry.path}: tensor {entry.name}"
        try:
            weight = torch.empty(entry.shape, dtype=self._dtype, device=device_of(name, self._devices))
        except RuntimeError:  # torch raises it for an allocation that failed; a sparse file can claim any size
            size = math.prod(entry.shape) * self._dtype.itemsize
            found = "found less; a narrower --dtype needs less"
            raise InputError(f"{where}: expected {size} bytes of free memory, {found}") from None
        read_into(entry, weight)
        if not all_finite(weight):
            raise InputError(f"{where}: expected finite values, found NaN or infinity")
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
