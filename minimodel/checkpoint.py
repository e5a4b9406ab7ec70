"""A checkpoint directory: its files, its tensors, and the checks of names and shapes before any tensor is read."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimodel import files
from minimodel.config import ModelConfig
from minimodel.config_file import read_config, read_rules
from minimodel.errors import InputError, refuse
from minimodel.files import Identity, inside, read_json_object
from minimodel.roles import NUM_ROLES, RoleRules
from minimodel.safetensors_file import TensorEntry, count_changed, require_float, table_of_contents

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ROLE_TABLE, ROLE_PICKLE = "role_embedding.safetensors", "role_embedding.pt"
CONTRACT, TOKENIZER = "contract.json", "tokenizer.json"

SHOWN = 12  # tensors that a warning names


@dataclass(frozen=True)
class Checkpoint:
    """The checked contents of a directory, from `open_checkpoint`."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, TensorEntry]  # where each tensor lies, by its name in the decoder; role_embedding.weight too
    contract: dict[str, Any] | None  # contract.json's object; None for a stock checkpoint (no role table, no contract)
    rules: RoleRules | None  # the role rules in that object
    warnings: tuple[str, ...]  # notes for the manifest
    files: dict[str, Identity | None]  # every file that decides a bit, as it was before the first one was read

    def cast_warnings(self, dtype: torch.dtype) -> list[str]:
        """Returns one line that names and counts the tensors whose values change when read as `dtype`, if any do."""
        changed = {name: count_changed(entry, dtype) for name, entry in self.tensors.items()}
        found = {name: count for name, count in changed.items() if count}
        if not found:
            return []
        sources = " and ".join(sorted({self.tensors[name].dtype for name in found}))
        counts = [f"{name} ({count} of {math.prod(self.tensors[name].shape)})" for name, count in found.items()]
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return [
            f"read as {str(dtype).removeprefix('torch.')} from {sources}, {sum(found.values())} values changed in "
            f"{len(found)} of {len(self.tensors)} tensors: {', '.join(counts[:SHOWN])}{more}"
        ]

    def require_unchanged(self) -> None:
        """InputError, naming the file, when one changed since the checkpoint was opened."""
        for name, before in self.files.items():
            files.require_unchanged(self.directory / name, before)


def open_checkpoint(directory: str | Path, stock: bool = False) -> Checkpoint:
    """Reads the small files and every table of contents; InputError for whatever does not fit. Reads no tensor.

    `stock`: a role table and a contract are ignored, whatever they hold.
    """
    directory = files.checkpoint_directory(directory)
    before = {name: files.identity(directory / name) for name in _deciding_files(directory)}
    config = read_config(read_json_object(inside(directory, CONFIG)), str(directory / CONFIG))
    tensors = _weights(directory)
    shapes = expected_shapes(config)
    warnings = []
    for name in sorted(set(tensors) - set(shapes)):
        if not name.endswith("rotary_emb.inv_freq"):  # a derived buffer that old checkpoints saved
            raise InputError(f"{tensors[name].path}: expected only tensors of Qwen2ForCausalLM, found {name[:120]!r}")
        warnings.append(f"{name} is derived from rope_theta and was not read")
        del tensors[name]
    for name, shape in shapes.items():
        if name not in tensors and not (name == "lm_head.weight" and config.tie_word_embeddings):
            raise InputError(f"{directory}: expected tensor {name} {list(shape)}, found none")
        if name in tensors and tensors[name].shape != shape:
            raise refuse(f"{tensors[name].path}: shape of {name}", str(list(shape)), list(tensors[name].shape))
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        warnings.append("tie_word_embeddings is true but the file holds lm_head.weight: the file's head is used")
    contract, rules = (None, None) if stock else _role_files(directory, config, tensors)
    for entry in tensors.values():
        require_float(entry)
    return Checkpoint(directory, config, tensors, contract, rules, tuple(warnings), before)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor's shape under its checkpoint name, in forward order, the role table's excepted."""
    e, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (e,),
        "self_attn.q_proj.weight": (q, e),
        "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.weight": (kv, e),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, e),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (e, q),
        "post_attention_layernorm.weight": (e,),
        "mlp.gate_proj.weight": (i, e),
        "mlp.up_proj.weight": (i, e),
        "mlp.down_proj.weight": (e, i),
    }
    layers = {f"model.layers.{n}.{name}": layer[name] for n in range(config.num_hidden_layers) for name in layer}
    head = (config.vocab_size, e)
    return {"model.embed_tokens.weight": head, **layers, "model.norm.weight": (e,), "lm_head.weight": head}


def _weights(directory: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of model.safetensors, or of the shards that the index names: each where the index says."""
    single, index = inside(directory, SINGLE), inside(directory, INDEX)
    if not index.exists():
        return table_of_contents(single)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse(f"{index}: weight_map", "an object from tensor names to file names", weight_map)
    if single.exists() and SINGLE not in weight_map.values():
        raise InputError(f"{directory}: expected {SINGLE} or {INDEX}, found both, and the index names other files")
    for name, file in weight_map.items():  # every entry is checked before any shard is opened
        if not inside(directory, file).is_file():
            raise InputError(f"{index}: expected the shard {file!r} of tensor {name[:120]!r}, found no such file")
    shards = sorted(set(weight_map.values()))
    tables = {file: table_of_contents(inside(directory, file)) for file in shards}
    entries = {(name, file): entry for file, table in tables.items() for name, entry in table.items()}
    for name, file in weight_map.items():
        if (name, file) not in entries:
            raise InputError(f"{directory / file}: expected tensor {name[:120]!r} as {INDEX} says, found none")
    for name, file in sorted(entries.keys() - weight_map.items()):
        raise InputError(f"{directory / file}: holds tensor {name[:120]!r}, which {INDEX} does not place there")
    return {name: entries[name, file] for name, file in weight_map.items()}


def _role_files(
    directory: Path, config: ModelConfig, tensors: dict[str, TensorEntry]
) -> tuple[dict[str, Any], RoleRules] | tuple[None, None]:
    """Adds the role table to `tensors` and returns contract.json's object and role rules, or (None, None).

    InputError where only one of the two files is there.
    """
    table, contract = inside(directory, ROLE_TABLE), inside(directory, CONTRACT)
    if not table.exists() and (directory / ROLE_PICKLE).exists():
        raise InputError(
            f"{directory / ROLE_PICKLE}: pickles are never read here; "
            f"convert it with: python -m experiments.adapt --base BASE --role-table {ROLE_PICKLE} --out DIR"
        )
    if table.exists() != contract.exists():
        raise InputError(f"{directory}: expected {ROLE_TABLE} and {CONTRACT} together, found only one of them")
    if not table.exists():
        return None, None
    entries = table_of_contents(table)
    if set(entries) != {"weight"}:
        raise refuse(f"{table}: tensors", "one, named 'weight'", sorted(entries))
    entry = entries["weight"]
    if len(entry.shape) != 2 or entry.shape[1] != config.hidden_size:
        raise refuse(f"{table}: shape of weight", f"[rows, {config.hidden_size}]", list(entry.shape))
    raw = read_json_object(contract)
    rules = read_rules(raw, str(contract))
    if entry.shape[0] < (needed := rules.role_offset + NUM_ROLES):
        raise refuse(f"{table}: rows", f"at least {needed}: role_offset plus six roles", entry.shape[0])
    tensors["role_embedding.weight"] = entry
    return raw, rules


def file_digests(checkpoint: "str | Path | Checkpoint") -> dict[str, str]:
    """Returns the SHA-256 of each file that decides a bit, by name, in name order: the checkpoint's identity.

    InputError when a file of an opened checkpoint changed since it was opened.
    """
    directory = checkpoint.directory if isinstance(checkpoint, Checkpoint) else Path(checkpoint)
    paths = {name: inside(directory, name) for name in _deciding_files(directory)}
    digests = {name: files.sha256_of(path) for name, path in paths.items() if path.is_file()}
    if isinstance(checkpoint, Checkpoint):
        checkpoint.require_unchanged()
    return digests


def _deciding_files(directory: Path) -> list[str]:
    """Returns the names of the files that decide a bit, sorted, whether they exist or not."""
    names = {CONFIG, TOKENIZER, ROLE_TABLE, CONTRACT, SINGLE, INDEX}
    index = inside(directory, INDEX)
    if index.exists():
        shards = read_json_object(index).get("weight_map")
        names |= {str(file) for file in shards.values()} if isinstance(shards, dict) else set()
    return sorted(names)
