"""Values that do not belong where they are put, by a seeded generator."""

import copy
import random
from typing import Any

DIGITS = 5000  # more than Python turns into an int
STRINGS = ["", " ", "qwen2", "weight", "F32", "BF16", "F8_E4M3", "I64", "a\nb", "\x1b[2J", "\u202eabc", "\u2028", "\0"]
NAMES = [
    "../outside.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "/dev/zero",
    "link.safetensors",
    "a/b",
    "\ud800",
    "x" * 300,
]
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 63)]
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), 1.0000000001]
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


def value(rng: random.Random) -> Any:
    """Something that does not belong where it is put."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(FLOATS)
    if kind == 3:
        return rng.choice(STRINGS)
    if kind == 4:
        return rng.choice(NAMES)
    if kind == 5:
        depth = rng.choice([5, 120, 300, 900, 940, 960, 970, 975, 980, 985, 990, 1500, 60_000])
        return Raw(rng.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth]))
    if kind == 6:
        return Raw(rng.choice(["9" * DIGITS, "1" + "0" * 400, "1e99999", "-0", "1E5", "0x10", "01"]))
    if kind == 7:
        return [
            rng.choice([*NUMBERS, *FLOATS, *STRINGS, None, [], {}]) for _ in range(rng.choice([0, 1, 2, 6, 7, 2000]))
        ]
    return copy.deepcopy(rng.choice([{}, {"a": 1}, {"rope_type": "yarn"}, {"type": "default"}, *TOKENIZER_PARTS]))
