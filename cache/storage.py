"""Tensors on disk with their provenance: one safetensors file, one JSON header, a digest per tensor.

Boundaries and traces have this form, ours and those of the recorder that runs transformers. The header is the value of
a single metadata key: with several, a file's bytes would depend on the order of the library's hash table.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cache.digest import tensor_sha256
from decode.contract import Contract
from minimodel.checkpoint import Checkpoint, file_digests
from minimodel.errors import InputError, refuse
from minimodel.files import parse_json
from minimodel.machine import machine_record
from minimodel.numerics import NumericContract
from minimodel.safetensors_file import FILE_DTYPES, TensorEntry, read_into, save_tensors, table_of_contents

HEADER = "stage_replay"
SOURCE = "stage-replay"  # `source` of what this project computed; the recorder writes "transformers 5.24.0"
COMMON = {  # every header's keys and their JSON types; a schema may add others
    "schema": str,
    "source": str,
    "row": str,
    "construction": str,
    "tokens": list,
    "functional_sha256": str,
    "contract": dict,
    "checkpoint": dict,
    "numeric": dict,
    "environment": dict,
    "tensors": dict,
}


@dataclass(frozen=True)
class Provenance:
    """The origin of a file's tensors."""

    source: str  # `SOURCE`, or the recorder's name and version
    checkpoint: Mapping[str, str]  # SHA-256 by file name (`minimodel.checkpoint.file_digests`)
    numeric: Mapping[str, Any]  # `NumericContract.record()`; the recorder puts its own attention under "attention"
    environment: Mapping[str, str]  # `minimodel.machine.machine_record()`

    @classmethod
    def here(cls, checkpoint: str | Path | Checkpoint, numeric: NumericContract) -> "Provenance":
        """Returns the provenance of what this process computes. Hashes the checkpoint's files.

        InputError unless `numeric` is in force, and when a file of an opened checkpoint changed since it was opened.
        """
        numeric.require_in_force()
        return cls(SOURCE, file_digests(checkpoint), numeric.record(), machine_record())


def contract_record(contract: Contract) -> dict[str, Any]:
    """Returns the part of the decoding contract that a header keeps: what decides a role, a block or a mask entry."""
    return {
        "open_ids": list(contract.open_ids),
        "close_ids": list(contract.close_ids),
        "caps": list(contract.caps),
        "visibility": [list(row) for row in contract.rules.visibility],
        "role_offset": contract.rules.role_offset,
    }


def write_tensors(
    path: Path, schema: str, header: Mapping[str, Any], provenance: Provenance, tensors: Mapping[str, Tensor]
) -> None:
    """Writes a file atomically: a reader sees all of it or none.

    header: the keys of `COMMON` and others of its schema. Schema, digests and provenance are added here.
    """
    kept = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    origin = {key: value if isinstance(value, str) else dict(value) for key, value in asdict(provenance).items()}
    digests = {name: tensor_sha256(tensor) for name, tensor in kept.items()}
    whole = {"schema": schema, **header, **origin, "tensors": digests}
    assert all(isinstance(whole.get(key), kind) for key, kind in COMMON.items()), "a header lacks a key"
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, kept, {HEADER: text})


@dataclass(frozen=True)
class Stored:
    """An opened file: its header, and tensors that are read and checked one by one."""

    path: Path
    header: dict[str, Any]
    entries: dict[str, TensorEntry]

    @property
    def names(self) -> list[str]:
        """The tensors' names, in the order in which they were written."""
        return list(self.header["tensors"])

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor to the CPU. InputError when its bytes are not those that were written."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=FILE_DTYPES[entry.dtype], device="cpu")
        read_into(entry, tensor)
        if tensor_sha256(tensor) != self.header["tensors"][name]:
            raise InputError(f"{self.path}: tensor {name}: expected the bytes that were written, found others")
        return tensor


def open_tensors(path: str | Path, schema: str | tuple[str, ...]) -> Stored:
    """Opens a file of one of the schemas. InputError says in one line what in its header does not fit."""
    path, schemas = Path(path), (schema,) if isinstance(schema, str) else schema
    entries = table_of_contents(path)
    with safe_open(path, framework="np") as opened:
        text = (opened.metadata() or {}).get(HEADER)
    if text is None:
        raise InputError(f"{path}: expected a file of schema {' or '.join(schemas)}, found no header of this project")
    header = parse_json(text.encode("utf-8", "surrogatepass"), f"{path}: header")
    if not isinstance(header, dict) or header.get("schema") not in schemas:
        found = header.get("schema") if isinstance(header, dict) else header
        raise refuse(f"{path}: schema", " or ".join(schemas), found)
    for key, kind in COMMON.items():
        if not isinstance(header.get(key), kind):
            raise refuse(f"{path}: header {key}", kind.__name__, header.get(key))
    if any(type(token) is not int for token in header["tokens"]):
        raise InputError(f"{path}: header tokens: expected integers only")
    if odd := sorted(set(header["tensors"]) ^ set(entries)):
        raise InputError(f"{path}: expected the tensors that the header lists, found {odd[0][:120]!r} on one side only")
    for name, entry in entries.items():
        if entry.dtype not in FILE_DTYPES:
            raise refuse(f"{path}: dtype of {name[:120]}", " or ".join(FILE_DTYPES), entry.dtype)
    return Stored(path, header, entries)


def require_same(path: Path, what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """InputError, naming the first key, where two flat records differ."""
    for key in [*expected, *(key for key in found if key not in expected)]:
        if found.get(key) != expected.get(key):
            raise refuse(f"{path}: {what} {key}", repr(expected.get(key)), found.get(key))
