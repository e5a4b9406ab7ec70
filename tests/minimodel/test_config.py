"""config.json: the keys that move numbers are read from where they stand, everything else is refused by name."""

import pytest

from minimodel.config_file import read_config
from tests.helpers import refused
from tests.tiny import CONFIG

FULL, SLIDING = "full_attention", "sliding_attention"


def read(**changes):
    """The tiny config with keys changed; a value of `...` removes the key."""
    raw = {**CONFIG, **changes}
    return read_config({key: value for key, value in raw.items() if value is not ...})


ONE_WINDOW = {"use_sliding_window": True, "sliding_window": 4}
SAME = [  # a change, and another that reads the same
    # the RoPE base in both spellings
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}, {"rope_theta": 5000.0}),
    ({"rope_theta": 5000, "rope_parameters": {"rope_theta": 5e3}}, {"rope_theta": 5000.0}),
    ({"rope_theta": ..., "rope_scaling": {"rope_theta": 5e3, "type": "default"}}, {"rope_theta": 5000.0}),
    ({"rope_theta": 5e3, "rope_scaling": None, "rope_parameters": None}, {"rope_theta": 5000.0}),
    # a window counts only when switched on, and then only in sliding layers
    ({"use_sliding_window": False, "sliding_window": 4}, {}),
    ({"use_sliding_window": ..., "sliding_window": 4}, {}),
    ({**ONE_WINDOW, "max_window_layers": 3}, {}),
    ({"use_sliding_window": False, "layer_types": [FULL] * 3}, {}),
    ({**ONE_WINDOW, "layer_types": [FULL] * 3}, {}),
    # nulls take the defaults of transformers 4.57 and, where its own checks let them pass, 5.24
    ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}),
    ({"use_sliding_window": None, "sliding_window": 4}, {}),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {}),
    ({"num_key_value_heads": None}, {"num_key_value_heads": CONFIG["num_attention_heads"]}),
    ({"quantization_config": {}}, {}),
    ({"quantization_config": None, "layer_types": None, "head_dim": None, "architectures": None}, {}),
]


@pytest.mark.parametrize(("change", "same"), SAME)
def test_keys_that_say_the_same(change, same):
    """DeepSpeed 8345, slime 1720 (case 8): the other spelling gave base 10,000; transformers 38002 (case 9)."""
    assert read(**change) == read(**same) != read(rope_theta=7.0)


def test_sizes_and_derived_head_size():
    """With 14 query heads over 2: onnx/onnx 7274 (case 7); over 4 they are refused below."""
    config = read()
    assert (config.hidden_size, config.head_dim) == (128, 32)
    assert read(head_dim=16).head_dim == 16 and read(head_dim=None).head_dim == 32
    assert read(num_attention_heads=14, num_key_value_heads=2, hidden_size=448).head_dim == 32


NO_BASE = "config.json: rope_theta|positive number"
REFUSED = [
    ({"rope_theta": 5e3, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta 5000.0|parameters.rope_theta 10000.0"),
    ({"rope_theta": ...}, "rope_theta|rope_parameters.rope_theta|neither"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}}, "rope_parameters.factor"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    *(({"rope_theta": value}, NO_BASE) for value in (0, -1.0, True, "1e6", [])),
    *(({"rope_theta": float(value)}, NO_BASE) for value in ("inf", "nan")),
    ({"rope_theta": 10**400}, NO_BASE),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "use_sliding_window"),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": ..., "num_hidden_layers": 29}, "28 of"),
    ({"use_sliding_window": 1}, "use_sliding_window"),
    ({"layer_types": [FULL, SLIDING, FULL]}, "layer_types"),
    ({"layer_types": FULL}, "layer_types"),
    *(({"layer_types": [FULL] * n}, f"layer_types|num_hidden_layers 3|found {n}") for n in (0, 2, 4)),
    ({"num_key_value_heads": ...}, "num_key_value_heads|found None"),  # transformers then takes 32
    ({"num_key_value_heads": 3}, "num_attention_heads|3|4"),
    ({"num_key_value_heads": 4, "num_attention_heads": 14, "hidden_size": 448}, "num_attention_heads|4|14"),
    ({"model_type": "llama"}, "model_type|'qwen2'|'llama'"),
    ({"architectures": ["Qwen2MoeForCausalLM"]}, "architectures|Qwen2MoeForCausalLM"),
    ({"model_type": ..., "architectures": ...}, "model_type|None"),
    ({"hidden_act": "gelu"}, "hidden_act|'silu'|'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config|gptq"),
    ({"hidden_size": 130}, "hidden_size|130"),
    ({"head_dim": 7}, "head_dim|even|7"),
    ({"vocab_size": 1 << 40}, f"vocab_size|{1 << 40}"),
    ({"num_hidden_layers": 0}, "num_hidden_layers|0"),
    ({"num_hidden_layers": True}, "num_hidden_layers|True"),
    ({"num_hidden_layers": 3.0}, "num_hidden_layers|3.0"),
    ({"intermediate_size": ...}, "intermediate_size|None"),
    ({"rms_norm_eps": 0}, "rms_norm_eps|0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings|'yes'"),
    *(
        ({key: None}, f"config.json: {key}|found None")
        for key in ("hidden_size", "rms_norm_eps", "max_position_embeddings", "hidden_act", "vocab_size")
    ),
]


@pytest.mark.parametrize(("change", "parts"), REFUSED)
def test_what_is_missing_or_not_implemented_is_refused_by_its_key(change, parts):
    """Query heads that no K/V head count divides (case 7), another RoPE (case 8), sliding layers (case 9)."""
    with refused("config.json", *parts.split("|")):
        read(**change)
