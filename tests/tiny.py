"""A tiny random multi-branch checkpoint, written as a real directory: every parameter random, norms and biases too."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decode.contract import CLOSE, OPEN
from minimodel.checkpoint import expected_shapes
from minimodel.config_file import read_config

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 288,  # 256 bytes, 1 end-of-text, 12 delimiters, 19 rows of padding
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
CHAT = ("<|im_start|>", "<|im_end|>")  # ids 269 and 270 of a stock checkpoint
CAPS = {"branch": 10, "merge": 12, "answer": 6}
TASK = {"question": "Which one is odd?", "choices": ["two", "four", "seven", "eight"]}


def random_weights(config: dict, seed: int = 0, scale: float = 0.15) -> dict[str, torch.Tensor]:
    """FP32 tensors under checkpoint names; norm weights near one, everything else normal with `scale`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(read_config(config)).items():
        weights[name] = torch.randn(shape, generator=generator) * scale
        if "norm" in name:
            weights[name] += 1.0
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    return weights


def write_tokenizer(path: Path, more: tuple[str, ...] = (), delimiters: tuple[str, ...] = (*OPEN, *CLOSE)) -> None:
    """Byte-level without merges: ids 0-255 are bytes, 256 is <|endoftext|>, 257-268 the delimiters, then `more`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", *delimiters, *more)])
    tokenizer.save(str(path))


def write_checkpoint(
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    config: dict | None = None,
    contract: dict | None = None,
    stock: bool = False,
) -> Path:
    """Writes config, weights, tokenizer and (unless `stock`) role table and contract; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**CONFIG, **(config or {})}
    (directory / "config.json").write_text(json.dumps(raw))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(raw, seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory / "tokenizer.json", CHAT if stock else ())
    if not stock:
        table = torch.randn(14, raw["hidden_size"], generator=torch.Generator().manual_seed(seed + 1)) * 0.3
        save_file({"weight": table.to(dtype)}, directory / "role_embedding.safetensors")
        (directory / "contract.json").write_text(json.dumps({"caps": CAPS, **(contract or {})}))
    return directory


def split_into_shards(directory: Path, count: int) -> None:
    """Replaces model.safetensors by `count` shards and their index, in Hugging Face's layout."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % count == shard}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
