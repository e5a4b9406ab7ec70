"""The boundary state: a prefix, its K/V cache and its next-token logits, in one construction; in memory and on disk."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cache.kv import KVCache
from cache.storage import Provenance, Stored, contract_record, open_tensors, require_same, write_tensors
from decode.contract import Contract
from decode.record import FunctionalRecord
from decode.state import State
from minimodel.bits import require_equal_copies
from minimodel.errors import InputError, refuse
from minimodel.load import placement

SCHEMA = "stage-replay-boundary-v1"


@dataclass(frozen=True)
class Boundary:
    """The state right after merge's opening delimiter, in storage of its own. Decoding continues on a copy."""

    construction: str  # "live", "incremental", "prefill", "prefill_in_calls_of_N" or a transplant's name
    state: State
    cache: KVCache
    logits: Tensor  # [B, V], of the last prefix token
    record: FunctionalRecord  # what entered the decoder
    margins: tuple[float | None, ...] = ()  # of the choices in the prefix (`Generated.margins`); live only
    # prefill only: makes the second, independent call of a replica
    rebuild: Callable[[], "Boundary"] | None = field(default=None, repr=False, compare=False)

    def replica(self) -> "Boundary":
        """Returns a second instance in other storage: a second call for prefill, else a bit-exact copy."""
        return self.copy() if self.rebuild is None else self.rebuild()

    @torch.inference_mode()
    def copy(self) -> "Boundary":
        """Returns a bit-exact deep copy, in inference tensors like every construction's."""
        return replace(self, cache=self.cache.copy(), logits=self.logits.clone(), record=self.record.copy())

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that the boundary owns: keys and values in forward order, then the logits."""
        return list(self.named_tensors().values())

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns `layers.0.key`, `layers.0.value`, ... [B, H_kv, S, D] in forward order, then `logits` [B, V]."""
        return {**{f"layers.{n}.{name}": tensor for n, name, tensor in self.cache.tensors()}, "logits": self.logits}

    def save(self, path: str | Path, provenance: Provenance, row: str = "") -> None:
        """Writes one safetensors file of every tensor, with the prefix and its provenance. row: the task's id."""
        header = {
            "row": row,
            "construction": self.construction,
            "tokens": list(self.state.tokens),
            "functional_sha256": self.record.sha256(),
            "contract": contract_record(self.state.contract),
            "margins": list(self.margins),
        }
        write_tensors(Path(path), SCHEMA, header, provenance, self.named_tensors())

    @classmethod
    @torch.inference_mode()
    def load(cls, path: str | Path, contract: Contract, provenance: Provenance) -> "Boundary":
        """Returns the saved boundary, bit for bit, on the devices of `provenance.numeric`.

        InputError unless checkpoint, decoding contract and numeric contract are those of `contract` and `provenance`. A
        loaded prefill has no second call: its replica is a copy.
        """
        path = Path(path)
        stored = open_tensors(path, SCHEMA)
        require_same(path, "checkpoint", stored.header["checkpoint"], provenance.checkpoint)
        require_same(path, "contract", stored.header["contract"], contract_record(contract))
        require_same(path, "numeric contract", stored.header["numeric"], provenance.numeric)
        state = State.from_tokens(contract, stored.header["tokens"])
        if not state.structure.at_boundary:
            raise InputError(f"{path}: tokens: expected a prefix that ends with merge's opening delimiter")
        record = FunctionalRecord.of_state(state.tokens, state.roles, contract.rules.visibility)
        if record.sha256() != stored.header["functional_sha256"]:
            raise InputError(f"{path}: functional_sha256: expected the digest of its own tokens, found another")
        cache, logits = _read(stored, len(state), provenance.numeric["device"])
        return cls(stored.header["construction"], state, cache, logits, record, tuple(stored.header["margins"]))


def _read(stored: Stored, length: int, device: str) -> tuple[KVCache, Tensor]:
    """Returns the cache and the logits of a boundary file after checking each tensor's digest and shape."""
    layers = (len(stored.names) - 1) // 2
    names = [f"layers.{layer}.{name}" for layer in range(layers) for name in ("key", "value")]
    if layers < 1 or set(stored.names) != {*names, "logits"}:
        raise refuse(f"{stored.path}: tensors", "layers.N.key, layers.N.value and logits", sorted(stored.names)[:4])
    shape = stored.entries[names[0]].shape
    if len(shape) != 4 or shape[2] != length:
        raise refuse(f"{stored.path}: shape of {names[0]}", f"[B, H_kv, {length}, D]", list(shape))
    logits = stored.tensor("logits")
    if logits.ndim != 2 or logits.shape[0] != shape[0]:
        raise refuse(f"{stored.path}: shape of logits", f"[{shape[0]}, V]", list(logits.shape))
    devices = placement(device, layers)
    cache = KVCache(shape, logits.dtype, devices)
    for layer in range(layers):
        key, value = (stored.tensor(f"layers.{layer}.{name}") for name in ("key", "value"))
        cache.append(layer, key, value)
    cache.require_equal_copies()
    require_equal_copies(logits, "boundary logits")
    cache.require_finite()
    return cache, logits.to(devices[0])
