"""Key/value storage that is allocated once, owns its length, and gives attention views."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minimodel.bits import require_equal_copies, require_finite, same_bits
from minimodel.decoder import Decoder
from minimodel.errors import InputError, refuse


class KVCache:
    """One key and one value tensor per layer, each its own storage [B, H_kv, capacity, D], filled from slot 0.

    Slots from `len(cache)` on are uninitialised and never read.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
        """shape: [B, H_kv, capacity, D] of each tensor. devices: of each layer."""
        self.layers, self.batch, self.capacity = len(devices), shape[0], shape[2]
        for name, count, least in (("batch", self.batch, 1), ("capacity", self.capacity, 0)):
            if type(count) is not int or count < least:
                raise refuse(f"cache {name}", f"a whole number of at least {least}", count)
        try:
            self._keys = [torch.empty(shape, dtype=dtype, device=device) for device in devices]
            self._values = [torch.empty(shape, dtype=dtype, device=device) for device in devices]
        except RuntimeError:  # torch raises it for an allocation that failed; a contract's caps may be far too large
            size = 2 * self.layers * math.prod(shape) * dtype.itemsize
            needed = f"{size} bytes of free memory for {self.capacity} tokens"
            raise InputError(f"cache: expected {needed}, found less; smaller caps in contract.json need less") from None
        self._length = 0
        self._begun = (0, 0)  # (layers written, T) of a decoder call that has not reached the last layer; else (0, 0)

    @classmethod
    def for_model(cls, model: Decoder, batch: int, capacity: int) -> "KVCache":
        """Allocates `capacity` tokens of `batch` copies in the model's dtype, each layer's on that layer's device."""
        shape = (batch, model.config.num_key_value_heads, capacity, model.config.head_dim)
        return cls(shape, model.numeric.torch_dtype, model.devices)

    def __len__(self) -> int:
        """Returns the number of tokens that every layer holds."""
        return self._length

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes T new tokens of one layer ([B, H_kv, T, D] each) and returns views of all S so far.

        A decoder call writes layers 0, 1, ... in order, T tokens each; after the last the length grows by T. InputError
        for another layer or T, beyond the capacity, and for another dtype or shape, which torch would convert or
        broadcast.
        """
        written, length = self._begun
        if layer != written:
            raise refuse("cache layer", f"layer {written}: a call writes every layer once, in order", layer)
        if written and keys.shape[2] != length:
            raise refuse(f"cache layer {layer}", f"{length} tokens, as layer 0 of this call had", keys.shape[2])
        held = self._keys[layer]  # [B, H_kv, capacity, D]
        expected = (*held.shape[:2], keys.shape[2], held.shape[3])  # [B, H_kv, T, D]
        for name, new in (("keys", keys), ("values", values)):
            if new.shape != expected or new.dtype != held.dtype:
                at = f"cache layer {layer} {name}"
                raise refuse(at, f"{list(expected)} {held.dtype}", f"{list(new.shape)} {new.dtype}")
        stop = self._length + keys.shape[2]
        if stop > self.capacity:
            raise refuse("cache length", f"at most its capacity {self.capacity}", stop)
        self._keys[layer][:, :, self._length : stop] = keys
        self._values[layer][:, :, self._length : stop] = values
        self._begun = (layer + 1, keys.shape[2])
        if layer == self.layers - 1:
            self._length, self._begun = stop, (0, 0)
        return self._keys[layer][:, :, :stop], self._values[layer][:, :, :stop]  # [B, H_kv, S, D] each

    def keys(self, layer: int) -> Tensor:
        """Returns a view [B, H_kv, n, D] of the n tokens held."""
        return self._keys[layer][:, :, : self._length]

    def values(self, layer: int) -> Tensor:
        """Returns a view [B, H_kv, n, D] of the n tokens held."""
        return self._values[layer][:, :, : self._length]

    def tensors(self) -> list[tuple[int, str, Tensor]]:
        """Returns (layer, "key" or "value", view) in forward order: the order of every comparison and digest."""
        return [
            (layer, name, tensor)
            for layer in range(self.layers)
            for name, tensor in (("key", self.keys(layer)), ("value", self.values(layer)))
        ]

    def copy(self, capacity: int | None = None) -> "KVCache":
        """Returns a bit-exact copy in other storage. Without `capacity` it is compact: its capacity is its length."""
        capacity = self._length if capacity is None else capacity
        if capacity < self._length:
            raise refuse("cache capacity", f"at least its length {self._length}", capacity)
        batch, heads, _, head_dim = self._keys[0].shape
        devices = [tensor.device for tensor in self._keys]
        other = KVCache((batch, heads, capacity, head_dim), self._keys[0].dtype, devices)
        other._length = self._length
        for (_, _, target), (_, _, source) in zip(other.tensors(), self.tensors()):
            target.copy_(source)
        return other

    def require_equal_copies(self) -> None:
        """RowFailure naming the first tensor in which the physical copies differ in bits."""
        for layer, name, tensor in self.tensors():
            require_equal_copies(tensor, f"cache layer {layer} {name}")

    def require_finite(self) -> None:
        """RowFailure naming the first tensor that holds NaN or infinity."""
        for layer, name, tensor in self.tensors():
            require_finite(tensor, f"cache layer {layer} {name}")

    def equals(self, other: "KVCache") -> bool:
        """Returns whether both have as many layers, and every tensor is equal in dtype, shape and raw bits."""
        pairs = zip(self.tensors(), other.tensors())
        return self.layers == other.layers and all(same_bits(left[2], right[2]) for left, right in pairs)
