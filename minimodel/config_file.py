"""Reads a checkpoint's shape from `config.json`, refusing by name what is not implemented, and its role rules from
`contract.json`.
"""

from typing import Any

from minimodel.config import ModelConfig
from minimodel.errors import InputError, refuse
from minimodel.roles import NUM_ROLES, ROLE_NAMES, ROLE_OFFSET, VISIBILITY, RoleRules

LARGEST = {  # far above any Qwen2.5: a larger value is refused before anything is allocated
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_position_embeddings": 1 << 24,
}
IMPLEMENTED: dict[str, tuple[str, tuple[Any, ...]]] = {  # key: what a refusal expects, and the accepted values
    "model_type": ("'qwen2'", (None, "qwen2")),
    "architectures": ("['Qwen2ForCausalLM']", (None, ["Qwen2ForCausalLM"])),
    "hidden_act": ("'silu'", ("silu",)),
    "quantization_config": ("none: quantized weights are not implemented", (None, {})),
}


def read_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads the object of a `config.json`; InputError names the key, what was expected and what was found."""
    if raw.get("model_type") is None and raw.get("architectures") is None:
        raise refuse(f"{where}: model_type", "'qwen2'", None)
    for key, (expected, accepted) in IMPLEMENTED.items():
        if key in raw and raw[key] not in accepted:
            raise refuse(f"{where}: {key}", expected, raw[key])
    _refuse_sliding_window(raw, where)
    # head_dim may be missing or null. num_key_value_heads may be null, transformers' spelling of one key/value head per
    # query head, but not missing: 0 is refused below
    absent = {"num_key_value_heads": 0, "head_dim": None}
    size: dict[str, int] = {}
    for key, largest in LARGEST.items():
        if (value := raw.get(key, absent.get(key))) is None and key in absent:
            continue
        if type(value) is not int or not 0 < value <= largest:
            raise refuse(f"{where}: {key}", f"an integer from 1 to {largest}", raw.get(key))
        size[key] = value
    heads, hidden = size["num_attention_heads"], size["hidden_size"]
    kv_heads = size.setdefault("num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse(f"{where}: num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads)
    if "head_dim" not in size and hidden % heads:
        raise refuse(f"{where}: hidden_size", f"a multiple of num_attention_heads {heads}", hidden)
    if size.setdefault("head_dim", hidden // heads) % 2:
        raise refuse(f"{where}: head_dim", "an even number, as rotary halves need", size["head_dim"])
    eps, tied = _positive(raw.get("rms_norm_eps"), f"{where}: rms_norm_eps"), _flag(raw, "tie_word_embeddings", where)
    return ModelConfig(**size, rms_norm_eps=eps, rope_theta=_rope_theta(raw, where), tie_word_embeddings=tied)


def _positive(value: Any, where: str) -> float:
    # a huge integer is refused by the comparison, which Python makes exactly; float() of it would raise
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise refuse(where, "a positive number", value)
    return float(value)


def _flag(raw: dict[str, Any], key: str, where: str) -> bool:
    value = False if raw.get(key) is None else raw[key]  # transformers writes null for "not set"
    if type(value) is not bool:
        raise refuse(f"{where}: {key}", "true or false", value)
    return value


def _refuse_sliding_window(raw: dict[str, Any], where: str) -> None:
    """InputError where a layer has a sliding window. The number `sliding_window` alone switches none on."""
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
    """Returns the RoPE base: transformers 4 writes `rope_theta`, 5 writes `rope_parameters.rope_theta`.

    InputError where there is none, where two differ, and for RoPE scaling.
    """
    spellings = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(name)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise refuse(f"{where}: {name}", "an object", parameters)
        spellings[f"{name}.rope_theta"] = parameters.get("rope_theta")
        plain = {"rope_type": ("default", None), "type": ("default", None), "partial_rotary_factor": (1, None)}
        for key, value in parameters.items():
            if key != "rope_theta" and value not in plain.get(key, ()):
                expected = "'default'" if key in ("rope_type", "type") else "no such key"
                raise refuse(f"{where}: {name}.{key}", f"{expected}: RoPE scaling is not implemented", value)
    found = {key: _positive(value, f"{where}: {key}") for key, value in spellings.items() if value is not None}
    if not found:
        raise InputError(f"{where}: expected rope_theta or rope_parameters.rope_theta, found neither")
    if len(set(found.values())) > 1:
        raise InputError(f"{where}: expected one RoPE base, found " + ", ".join(f"{k} {v}" for k, v in found.items()))
    return found.popitem()[1]


def read_rules(raw: dict[str, Any], where: str = "contract.json") -> RoleRules:
    """Reads `role_offset` and `visibility` of a contract object; absent keys take the values of `minimodel.roles`."""
    offset, table = raw.get("role_offset", ROLE_OFFSET), raw.get("visibility", [list(row) for row in VISIBILITY])
    if type(offset) is not int or not 0 <= offset <= 1 << 16:
        raise refuse(f"{where}: role_offset", "an integer from 0 to 65536", offset)
    if not isinstance(table, list) or len(table) != NUM_ROLES:
        raise refuse(f"{where}: visibility", "six rows, one per role", table)
    for role, row in enumerate(table):
        at = f"{where}: visibility row {role} ({ROLE_NAMES[role]})"
        if not isinstance(row, list) or len(row) != NUM_ROLES or any(type(x) is not int or x >> 1 for x in row):
            raise refuse(at, "six entries of 0 or 1", row)
        if row[role] != 1:  # such a token could attend to nothing at the start of its block
            raise refuse(at, "a 1 on the diagonal", row)
    return RoleRules(offset, tuple(tuple(row) for row in table))
