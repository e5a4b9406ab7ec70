"""Damaged and hostile checkpoint files, made from good ones by a seeded generator."""

import copy
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIGITS = 5000  # more than Python turns into an int
STRINGS = ["", " ", "qwen2", "weight", "F32", "BF16", "F8_E4M3", "I64", "a\nb", "\x1b[2J", "\u202eabc", "\u2028", "\0"]
NAMES = ["../outside.safetensors", "/etc/passwd", "..", ".", "/dev/zero", "link.safetensors", "a/b", "\ud800"]
NAMES += ["x" * 300]
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 63)]
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), 1.0000000001]
NO_PAIR, PAD = {"pair": [], "special_tokens": {}}, {"pad_id": 0, "pad_type_id": 0, "pad_token": ""}
TOKENIZER_PARTS = [
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Split", "pattern": {"Regex": "(.+.+)+\u00ff"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"Regex": ""}, "behavior": "MergedWithNext", "invert": False},
    {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 0}]},
    {"type": "FixedLength", "length": 0},
    {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
    {"type": "Strip", "content": "W", "start": 1000, "stop": 1000},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "ByteFallback"},
    {"type": "NFC"},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
    {
        "strategy": {"Fixed": 1 << 40},
        "direction": "Left",
        "pad_to_multiple_of": 0,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "",
    },
]


class Raw(str):
    """JSON text that `json` would not write: a number of many digits, a value of great depth."""


DEPTHS = [5, 120, 300, 900, 940, 960, 970, 975, 980, 985, 990, 1500, 60_000]


def value(rng: random.Random) -> Any:
    """Something that does not belong where it is put."""
    kind = rng.randrange(9)
    if kind < 5:
        return rng.choice(([None, True, False], NUMBERS, FLOATS, STRINGS, NAMES)[kind])
    if kind == 5:
        depth = rng.choice(DEPTHS)
        return Raw(rng.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth]))
    if kind == 6:
        return Raw(rng.choice(["9" * DIGITS, "1" + "0" * 400, "1e99999", "-0", "1E5", "0x10", "01"]))
    if kind == 7:
        mixed = [*NUMBERS, *FLOATS, *STRINGS, None, [], {}]
        return [rng.choice(mixed) for _ in range(rng.choice([0, 1, 2, 6, 7, 2000]))]
    return copy.deepcopy(rng.choice([{}, {"a": 1}, {"rope_type": "yarn"}, {"type": "default"}, *TOKENIZER_PARTS]))


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Replaces, removes, renames, copies or adds one to three things at random places of a JSON value."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not isinstance(tree, dict | list) or not tree:
            return tree
        holder = tree
        while rng.random() < 0.6:
            children = holder.values() if isinstance(holder, dict) else holder
            inner = [child for child in children if isinstance(child, dict | list) and child]
            if not inner:
                break
            holder = rng.choice(inner)
        _mutate_at(rng, holder)
    return tree


def _mutate_at(rng: random.Random, holder: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    key, kind = rng.choice(keys), rng.randrange(6)
    if kind <= 1:
        holder[key] = value(rng)
    elif kind == 2:
        del holder[key]
    elif kind == 3:
        other = rng.choice(keys)
        holder[key], holder[other] = holder[other], holder[key]
    elif isinstance(holder, dict):
        name = rng.choice([*STRINGS, *NAMES, "rope_scaling", "layer_types", "dropout", "head_dim", "lm_head.weight"])
        holder[name] = holder.pop(key) if kind == 4 else value(rng)
    else:
        holder.append(copy.deepcopy(holder[key]) if kind == 4 else value(rng))


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
            other = rng.choice([b"", b"\0", b"\xff\xfe", b'"', b"{", b"]", b"null", b"-1"])
            changed[at : at + rng.randrange(1, 9)] = other
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
    """Replaces a file by what is none of this directory: nothing, a pipe, a folder, a link out or to itself."""
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind < 5:
        path.symlink_to(["/dev/zero", path.name, path.parent.parent / "outside.safetensors"][kind - 2])


MUTATORS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "config.json": mutate_json,
    "contract.json": mutate_json,
    "tokenizer.json": mutate_tokenizer,
    "model.safetensors.index.json": mutate_json,
    "model.safetensors": mutate_safetensors,
    "model-00001-of-00002.safetensors": mutate_safetensors,
    "role_embedding.safetensors": mutate_safetensors,
}
