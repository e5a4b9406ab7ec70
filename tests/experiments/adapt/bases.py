"""A base like a public one, whole and in shards, and adapting it as a user does."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.experiments.runs import call
from tests.tiny import CHAT, CONFIG, random_weights, split_into_shards, write_tokenizer

CAPS = ("--branch-cap", 6, "--merge-cap", 6, "--answer-cap", 4)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def adapted(base: Path, out: Path, *more: object) -> Path:
    result = call("adapt", "--base", base, "--out", out, *CAPS, *more)
    assert result.exit_code == 0, result.output
    return out


def write_base(directory: Path, spare: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Path:
    """A public-like base: bytes, <|endoftext|>, <|im_start|>, <|im_end|>; `spare` rows beyond the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer.json", CHAT, delimiters=())
    config = {**CONFIG, "vocab_size": 259 + spare, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shard(directory: Path, out: Path) -> Path:
    """The same checkpoint in two shards with an index, every other tensor in each."""
    shutil.copytree(directory, out)
    split_into_shards(out, 2)
    return out
