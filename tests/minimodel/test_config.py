"""config.json: the keys that move numbers are read from where they stand, everything else is refused by name."""

from typing import Any

import pytest

from minimodel.config import ModelConfig
from tests.helpers import refused
from tests.tiny import CONFIG


def read(**changes: Any) -> ModelConfig:
    """The tiny config with keys changed; a value of `...` removes the key."""
    raw = {**CONFIG, **changes}
    return ModelConfig.from_dict({key: value for key, value in raw.items() if value is not ...})


def test_sizes_and_derived_head_size():
    config = read()
    assert (config.hidden_size, config.head_dim, config.num_key_value_groups) == (128, 32, 2)
    assert read(head_dim=16).head_dim == 16
    assert read(head_dim=None).head_dim == 32


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        {"rope_theta": 5000, "rope_parameters": {"rope_theta": 5000.0}},
        {"rope_theta": ..., "rope_scaling": {"rope_theta": 5000.0, "type": "default"}},
        {"rope_theta": 5000.0, "rope_scaling": None, "rope_parameters": None},
    ],
)
def test_rope_base_is_read_in_both_spellings(spelling):
    """microsoft/DeepSpeed 8345, THUDM/slime 1720: the other spelling silently gave base 10,000 (case 8)."""
    assert read(**spelling).rope_theta == 5000.0


def test_rope_bases_that_disagree_are_refused_by_their_keys():
    with refused("rope_theta 5000.0", "rope_parameters.rope_theta 10000.0"):
        read(rope_theta=5000.0, rope_parameters={"rope_theta": 10000.0})


def test_missing_rope_base_is_refused_by_both_keys():
    with refused("rope_theta", "rope_parameters.rope_theta", "neither"):
        read(rope_theta=...)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)
def test_scaled_rope_is_refused_by_its_key(change, key):
    with refused(key):
        read(**change)


@pytest.mark.parametrize("value", [0, -1.0, True, "1e6", float("inf"), float("nan"), 10**400, []])
def test_rope_base_that_is_no_positive_number_is_refused(value):
    with refused("config.json: rope_theta", "positive number"):
        read(rope_theta=value)


@pytest.mark.parametrize(
    "flags",
    [
        {"use_sliding_window": False, "sliding_window": 4},
        {"use_sliding_window": ..., "sliding_window": 4},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 3},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 3},
    ],
)
def test_window_number_without_a_sliding_layer_changes_nothing(flags):
    """huggingface/transformers 38002: the number counts only when switched on, and then only in sliding layers."""
    assert read(**flags) == read()


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": ..., "num_hidden_layers": 29}, "28 of"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
    ],
)
def test_sliding_layers_are_refused(flags, key):
    """huggingface/transformers 38002, the other half (case 9)."""
    with refused(key):
        read(**flags)


@pytest.mark.parametrize(
    ("nulls", "same"),
    [
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}),
        ({"use_sliding_window": None, "sliding_window": 4}, {}),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": CONFIG["num_attention_heads"]}),
        ({"quantization_config": {}}, {}),
        ({"quantization_config": None, "layer_types": None, "head_dim": None, "architectures": None}, {}),
    ],
)
def test_nulls_take_the_defaults_that_transformers_takes(nulls, same):
    """As 4.57 and, where its own checks let them pass, 5.24 take them."""
    assert read(**nulls) == read(**same)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "max_position_embeddings", "hidden_act", "vocab_size"])
def test_nulls_without_a_default_are_refused_by_their_key(key):
    with refused(f"config.json: {key}", "found None"):
        read(**{key: None})


def test_a_missing_count_of_key_value_heads_is_refused():
    """transformers takes 32 then, whatever the number of query heads."""
    with refused("config.json: num_key_value_heads", "found None"):
        read(num_key_value_heads=...)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_layer_types_of_another_length_are_refused(count):
    with refused("config.json: layer_types", "num_hidden_layers 3", f"found {count}"):
        read(layer_types=["full_attention"] * count)
    assert read(layer_types=["full_attention"] * 3) == read()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "llama"}, ("model_type", "'qwen2'", "'llama'")),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, ("architectures", "Qwen2MoeForCausalLM")),
        ({"model_type": ..., "architectures": ...}, ("model_type", "None")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'silu'", "'gelu'")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "3", "4")),
        ({"hidden_size": 130}, ("hidden_size", "130")),
        ({"head_dim": 7}, ("head_dim", "even", "7")),
        ({"vocab_size": 1 << 40}, ("vocab_size", str(1 << 40))),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"num_hidden_layers": 3.0}, ("num_hidden_layers", "3.0")),
        ({"intermediate_size": ...}, ("intermediate_size", "None")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps", "0")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, parts):
    with refused("config.json", *parts):
        read(**change)


def test_fourteen_heads_over_four_are_refused_and_over_two_are_not():
    """onnx/onnx 7274 (case 7)."""
    assert read(num_attention_heads=14, num_key_value_heads=2, hidden_size=448).num_key_value_groups == 7
    with refused("num_attention_heads", "4", "14"):
        read(num_attention_heads=14, num_key_value_heads=4, hidden_size=448)
