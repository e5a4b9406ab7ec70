"""A base like a public one, whole and in shards, and adapting it as a user does."""

import json
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from experiments.adapt import __main__ as adapt
from tests.tiny import CONFIG, random_weights

CAPS = ("--branch-cap", 6, "--merge-cap", 6, "--answer-cap", 4)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(adapt.main, [str(a) for a in arguments])


def adapted(base: Path, out: Path, *more: object) -> Path:
    result = run("--base", base, "--out", out, *CAPS, *more)
    assert result.exit_code == 0, result.output
    return out


def write_base(directory: Path, spare: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Path:
    """A public-like base: bytes, <|endoftext|>, <|im_start|>, <|im_end|>; `spare` rows beyond the tokenizer."""
    from tokenizers import decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**CONFIG, "vocab_size": 259 + spare, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shard(directory: Path, out: Path) -> Path:
    """The same checkpoint in two shards with an index, every other tensor in each."""
    shutil.copytree(directory, out)
    weights = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for index, file in enumerate(files):
        save_file({n: t for i, (n, t) in enumerate(sorted(weights.items())) if i % 2 == index}, out / file)
    placed = {name: files[i % 2] for i, name in enumerate(sorted(weights))}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return out
