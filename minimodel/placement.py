"""The device of each part of a decoder, and moving tensors between the devices of neighbouring layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minimodel.errors import refuse


def placement(device: str, layers: int) -> list[torch.device]:
    """Returns each layer's device: consecutive layers in order over the devices, as evenly as possible.

    The embedding lies with the first layer; final norm and head with the last. InputError for more devices than layers.
    """
    devices = [torch.device(name) for name in device.split(",")]
    if len(devices) > layers:
        raise refuse("devices", f"at most one for each of {layers} layers", device)
    return [devices[layer * len(devices) // layers] for layer in range(layers)]


def place_of(name: str, places: Sequence[torch.device]) -> torch.device:
    """Returns the device of a tensor of the checkpoint by its name; `places` are the layers' devices."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return places[int(parts[2])]
    return places[-1] if name in ("model.norm.weight", "lm_head.weight") else places[0]


class Borders:
    """The layers that lie on another device than the part before them."""

    def __init__(self, first: torch.device, places: Sequence[torch.device]) -> None:
        self.into = {i: place for i, (before, place) in enumerate(zip((first, *places), places)) if before != place}

    def cross(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors where `layer` lies. Moving changes no bit."""
        return tuple(tensor.to(self.into[layer]) for tensor in tensors) if layer in self.into else tensors
