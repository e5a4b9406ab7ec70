"""Damaged and hostile checkpoint files, made from good ones by a seeded generator."""

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.hostile_values import NAMES, STRINGS, TOKENIZER_PARTS, Raw, value


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Replaces, removes, renames, copies or adds one to three things at random places of a JSON value."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not isinstance(tree, dict | list) or not tree:
            return tree
        holder = tree
        while rng.random() < 0.6:
            inner = [child for child in _children(holder) if isinstance(child, dict | list) and child]
            if not inner:
                break
            holder = rng.choice(inner)
        _mutate_at(rng, holder)
    return tree


def _children(holder: Any) -> list[Any]:
    return list(holder.values()) if isinstance(holder, dict) else holder


def _mutate_at(rng: random.Random, holder: Any) -> None:
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.randrange(6)
    if kind <= 1:
        holder[key] = value(rng)
    elif kind == 2:
        del holder[key]
    elif kind == 3:
        other = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif isinstance(holder, dict):
        name = rng.choice([*STRINGS, *NAMES, "rope_scaling", "layer_types", "dropout", "head_dim", "lm_head.weight"])
        holder[name] = holder.pop(key) if kind == 4 else value(rng)
    elif kind == 4:
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder.append(value(rng))


def dump(rng: random.Random, tree: Any) -> bytes:
    """JSON text of a mutated tree, `Raw` parts put in as they are; now and then a key stands twice."""
    marks: dict[str, str] = {}

    def mark(node: Any) -> Any:
        if isinstance(node, Raw):
            name = f"@raw{len(marks)}@"
            marks[name] = node
            return name
        if isinstance(node, dict):
            return {k: mark(v) for k, v in node.items()}
        return [mark(v) for v in node] if isinstance(node, list) else node

    text = json.dumps(mark(tree))
    for name, raw in marks.items():
        text = text.replace(f'"{name}"', raw)
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flips, cuts, repeats, inserts or overwrites bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = changed[at : at + rng.randrange(1, 60)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            changed[at : at + rng.randrange(1, 9)] = rng.choice(
                [b"", b"\0", b"\xff\xfe", b'"', b"{", b"]", b"null", b"-1"]
            )
        else:
            del changed[at : at + rng.randrange(1, 40)]
    return bytes(changed)


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """A JSON file: mostly another value in valid JSON, at times other bytes."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data)
    return dump(rng, value(rng) if rng.random() < 0.02 else mutate_tree(rng, json.loads(data)))


def mutate_tokenizer(rng: random.Random, data: bytes) -> bytes:
    """A tokenizer: as often as not, one of its parts is another kind of part."""
    if rng.random() < 0.5:
        return mutate_json(rng, data)
    tree = json.loads(data)
    places = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"]
    for place in rng.sample(places, rng.choice([1, 1, 2])):
        part = copy.deepcopy(rng.choice(TOKENIZER_PARTS))
        tree[place] = mutate_tree(rng, part) if rng.random() < 0.3 else part
    return dump(rng, tree)


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A weights file: its header as JSON or as bytes, its length field, its data."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.6:
        header = dump(rng, mutate_tree(rng, json.loads(header)))
    elif kind < 0.75:
        header = mutate_bytes(rng, header)
    elif kind < 0.85:
        lengths = [0, 1, length - 1, length + 1, len(data), 1 << 20, 100_000_001, 1 << 31, 1 << 60, (1 << 64) - 1]
        return struct.pack("<Q", rng.choice(lengths)) + header + body
    elif kind < 0.95:
        body = mutate_bytes(rng, body)
    else:
        return mutate_bytes(rng, data)
    return struct.pack("<Q", len(header)) + header + body


def mutate_kind(rng: random.Random, path: Path) -> None:
    """What stands in a file's place is no file of this directory: a pipe, a folder, a link that leads out or round."""
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        import os

        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to(path.parent.parent / "outside.safetensors")


MUTATORS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "config.json": mutate_json,
    "contract.json": mutate_json,
    "tokenizer.json": mutate_tokenizer,
    "model.safetensors.index.json": mutate_json,
    "model.safetensors": mutate_safetensors,
    "model-00001-of-00002.safetensors": mutate_safetensors,
    "role_embedding.safetensors": mutate_safetensors,
}
