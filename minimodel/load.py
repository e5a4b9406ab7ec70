"""From a checkpoint directory to a running decoder."""

from pathlib import Path

import torch
from torch import Tensor

from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.numerics import NumericContract
from minimodel.roles import RoleRules
from minimodel.safetensors_file import read_into


def load_model(directory: str | Path, numeric: NumericContract) -> Decoder:
    """Opens, checks and reads a checkpoint, tensor by tensor straight into place, and puts `numeric` in force.

    Peak memory: the weights in the model dtype plus a staging buffer of 32 MiB. A directory without role table and
    contract.json gives a stock decoder (`roles=None`, causal mask). InputError says in one line what does not fit.
    """
    numeric.apply()
    return decoder_from(open_checkpoint(directory), numeric)


def decoder_from(checkpoint: Checkpoint, numeric: NumericContract) -> Decoder:
    """Reads the tensors of an opened checkpoint. InputError names a tensor that holds NaN or infinity."""
    weights: dict[str, Tensor] = {}
    for name, entry in checkpoint.tensors.items():
        weights[name] = torch.empty(entry.shape, dtype=numeric.torch_dtype, device=numeric.torch_device)
        read_into(entry, weights[name])
        if not all_finite(weights[name]):
            raise InputError(f"{entry.path}: tensor {entry.name}: expected finite values, found NaN or infinity")
    rules = None
    if checkpoint.contract is not None:
        rules = RoleRules.from_contract(checkpoint.contract, str(checkpoint.directory / "contract.json"))
    return Decoder(checkpoint.config, weights, numeric, rules)


def all_finite(tensor: Tensor) -> bool:
    """True without NaN or infinity; min and max propagate both, and need no mask the size of the tensor."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
