"""The public Qwen2.5 shapes, each from its model's own config.json, as objects that `ModelConfig.from_dict` reads."""

from typing import Any

from minimodel.config import ModelConfig

_SHAPES = {  # hidden_size, intermediate_size, layers, heads, K/V heads, vocab_size, tied
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064, False),
}
PRESETS = tuple(_SHAPES)


def preset(name: str) -> ModelConfig:
    """The config of a name of `PRESETS`."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = _SHAPES[name]
    raw: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }
    return ModelConfig.from_dict(raw, name)
