"""`config.json` of a Qwen2.5 checkpoint: the decoder's shape, and a refusal by name of all that is not implemented."""

from dataclasses import dataclass
from typing import Any

from minimodel.errors import InputError, refuse


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2.5 decoder, under Hugging Face's names (transformers `Qwen2Config`, 4.46 to 5.24)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key/value head: H // H_kv."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads the object of a `config.json`; InputError names the key, what was expected and what was found."""
        _refuse_other_models(raw, where)
        _refuse_sliding_window(raw, where)
        # a null, unlike a missing key, is transformers' own spelling of one key/value head per query head
        optional = {"num_key_value_heads": 0, "head_dim": None}
        derived = [key for key, missing in optional.items() if raw.get(key, missing) is None]
        size = {key: _size(raw, key, where) for key in LARGEST if key not in derived}
        heads, hidden = size["num_attention_heads"], size["hidden_size"]
        kv_heads = size.setdefault("num_key_value_heads", heads)
        if heads % kv_heads:
            raise refuse(f"{where}: num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads)
        if "head_dim" not in size and hidden % heads:
            raise refuse(f"{where}: hidden_size", f"a multiple of num_attention_heads {heads}", hidden)
        if size.setdefault("head_dim", hidden // heads) % 2:
            raise refuse(f"{where}: head_dim", "an even number, as rotary halves need", size["head_dim"])
        return cls(
            **size,
            rms_norm_eps=_positive(raw.get("rms_norm_eps"), f"{where}: rms_norm_eps"),
            rope_theta=_rope_theta(raw, where),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings", where),
        )


LARGEST = {  # far above any Qwen2.5; a hostile config is refused before anything is allocated
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": 1 << 24,
}
IMPLEMENTED: dict[str, tuple[str, tuple[Any, ...]]] = {  # key -> what is expected of it, and the values that say so
    "model_type": ("'qwen2'", (None, "qwen2")),
    "architectures": ("['Qwen2ForCausalLM']", (None, ["Qwen2ForCausalLM"])),
    "hidden_act": ("'silu'", ("silu",)),
    "quantization_config": ("none: quantized weights are not implemented", (None, {})),
}


def _size(raw: dict[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if type(value) is not int or not 0 < value <= LARGEST[key]:
        raise refuse(f"{where}: {key}", f"an integer from 1 to {LARGEST[key]}", value)
    return value


def _positive(value: Any, where: str) -> float:
    # Python compares int with float exactly, so a huge integer is refused here and never converted
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise refuse(where, "a positive number", value)
    return float(value)


def _flag(raw: dict[str, Any], key: str, where: str) -> bool:
    value = False if raw.get(key) is None else raw[key]  # transformers writes null for "not set"
    if type(value) is not bool:
        raise refuse(f"{where}: {key}", "true or false", value)
    return value


def _refuse_other_models(raw: dict[str, Any], where: str) -> None:
    if raw.get("model_type") is None and raw.get("architectures") is None:
        raise refuse(f"{where}: model_type", "'qwen2'", None)
    for key, (expected, accepted) in IMPLEMENTED.items():
        if key in raw and raw[key] not in accepted:
            raise refuse(f"{where}: {key}", expected, raw[key])


def _refuse_sliding_window(raw: dict[str, Any], where: str) -> None:
    """A window counts only when it is switched on and some layer slides; the bare number `sliding_window` does not."""
    kinds, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    switched_on = _flag(raw, "use_sliding_window", where) and raw.get("sliding_window", 4096) is not None
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise refuse(f"{where}: layer_types", "only 'full_attention': sliding windows are not implemented", kinds)
        if len(kinds) != layers:
            expected = f"one entry for each of num_hidden_layers {layers!r:.40}"
            raise InputError(f"{where}: layer_types: expected {expected}, found {len(kinds)}")
    elif switched_on:
        first = raw.get("max_window_layers", 28)  # transformers' default; layers from this one on slide
        if type(first) is not int or type(layers) is not int or first < layers:
            found = f"true with max_window_layers {first} of {layers} layers"
            raise refuse(f"{where}: use_sliding_window", "false: sliding windows are not implemented", found)


def _rope_theta(raw: dict[str, Any], where: str) -> float:
    """transformers 4 writes `rope_theta`, 5 writes `rope_parameters.rope_theta`; both must agree where both stand."""
    spellings = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(name)
        if parameters is not None:
            _refuse_scaled(parameters, f"{where}: {name}")
            spellings[f"{name}.rope_theta"] = parameters.get("rope_theta")
    found = {key: _positive(value, f"{where}: {key}") for key, value in spellings.items() if value is not None}
    if not found:
        raise InputError(f"{where}: expected rope_theta or rope_parameters.rope_theta, found neither")
    if len(set(found.values())) > 1:
        raise InputError(f"{where}: expected one RoPE base, found " + ", ".join(f"{k} {v}" for k, v in found.items()))
    return found.popitem()[1]


def _refuse_scaled(parameters: Any, where: str) -> None:
    if not isinstance(parameters, dict):
        raise refuse(where, "an object", parameters)
    for key, value in parameters.items():
        if key in ("rope_type", "type") and value not in ("default", None):
            raise refuse(f"{where}.{key}", "'default': RoPE scaling is not implemented", value)
        if key not in ("rope_type", "type", "rope_theta") and not (
            key == "partial_rotary_factor" and value in (1, None)
        ):
            raise refuse(f"{where}.{key}", "no such key: RoPE scaling is not implemented", value)
