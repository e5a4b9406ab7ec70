"""The demo's model: configuration, seeded initial weights, the training loss, the files of a checkpoint directory."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from decode.contract import contract_document
from experiments.demo.corpus import CAPS, TEMPLATE, Batch
from experiments.run.ledger import write_whole
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.roles import ROLE_ROWS, attention_mask, position_ids
from minimodel.safetensors_file import save_tensors

ROLE_EMBEDDING = "role_embedding.weight"
ROPE_THETA = 1000000.0
PREVIOUS_TOKEN_BIAS = 8.0


def config_json(vocab_size: int) -> dict[str, object]:
    """Returns `config.json`: Hugging Face's Qwen2, four layers, 4 query and 2 key/value heads of size 64.

    It spells the RoPE base twice: transformers 4.x reads `rope_theta`, 5.x `rope_parameters`.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": 2048,
        "max_window_layers": 4,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Returns FP32 weights: norms one, biases zero, embeddings of deviation 0.02, matrices of fan_in ** -0.5.

    Matrices that write into the residual stream start at 0.3 of that. Role rows 0-7 start at zero and stay there: no
    token reads them, so they get no gradient, and AdamW decays nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {**expected_shapes(config), ROLE_EMBEDDING: (ROLE_ROWS, config.hidden_size)}
    del shapes["lm_head.weight"]  # tied to the embedding
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name or name.endswith(".bias"):
            weights[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
            continue
        scale = 0.3 * shape[-1] ** -0.5 if "o_proj" in name or "down_proj" in name else shape[-1] ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * (0.02 if "embed" in name else scale)
    weights[ROLE_EMBEDDING][:8] = 0.0
    set_early_heads(weights, config)
    return weights


def set_early_heads(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Sets two kinds of head that a small model learns late.

    The first query head of layer 0 attends to the previous token, whatever the tokens: its biases alone give the score
    s * sum of cos(w (i - j - 1)) over the RoPE frequencies w, largest at j = i - 1. In each layer the first query head
    of the last K/V head attends to equal tokens: its query and key weights are equal.
    """
    size, half = config.head_dim, config.head_dim // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    query, key = (weights[f"model.layers.0.self_attn.{name}_proj.bias"][:size] for name in "qk")
    key[:half] = PREVIOUS_TOKEN_BIAS
    query[:half], query[half:] = PREVIOUS_TOKEN_BIAS * frequency.cos(), -PREVIOUS_TOKEN_BIAS * frequency.sin()
    first = (config.num_key_value_heads - 1) * size
    start = first * config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        query, key = (weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qk")
        query[start : start + size] = key[first : first + size]


def loss_sum(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of next-token cross entropies and the sum of the weights, both FP32 scalars.

    Only positions whose target has a weight get logits (rounded up to a multiple of 256 rows, so that few shapes
    occur). The cross entropy is computed in FP32.
    """
    mask = attention_mask(batch.roles, batch.roles, valid_key=batch.valid)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = decoder(batch.ids, batch.roles, position_ids(batch.valid), mask, None)
        weights, targets = batch.weights[:, 1:].flatten(), batch.ids[:, 1:].flatten()
        chosen = weights.argsort(descending=True, stable=True)[: -(-int((weights > 0).sum()) // 256) * 256]
        logits = decoder.logits(hidden[:, :-1].flatten(0, 1)[chosen][None])[0]
    losses = F.cross_entropy(logits.float(), targets[chosen], reduction="none")
    return (losses * weights[chosen]).sum(), weights.sum()


def write_checkpoint(
    directory: Path, config: Mapping[str, object], weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Writes a checkpoint directory in BF16: config, weights, tokenizer, role table and contract.

    Each file is written aside and then renamed, so a reader that has mapped the older file keeps its bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    role_table = stored.pop(ROLE_EMBEDDING)
    for name, tensors in (("model", stored), ("role_embedding", {"weight": role_table})):
        save_tensors(directory / f"{name}.safetensors", tensors, {"format": "pt"})
    write_whole(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    for name, content in (("config", dict(config)), ("contract", contract_document(CAPS, TEMPLATE))):
        write_whole(directory / f"{name}.json", json.dumps(content, indent=2) + "\n")
