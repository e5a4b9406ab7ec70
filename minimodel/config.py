"""The shape of a Qwen2.5 decoder, under Hugging Face's names. `config_file` reads it from `config.json`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2.5 decoder (transformers `Qwen2Config`, 4.46 to 5.24)."""

    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # I
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # H_kv
    head_dim: int  # D
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
