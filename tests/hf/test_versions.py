"""What versions.py tells apart: releases, argument names, and how a cache is read."""

from types import SimpleNamespace

import pytest
import torch

from minimodel.errors import InputError
from tests.hf import versions


@pytest.mark.parametrize(
    "version, kernel",
    [("4.46.3", "repeat_kv"), ("4.57.6", "repeat_kv"), ("5.3.0", "repeat_kv"), ("5.22.0", "repeat_kv")]
    + [("5.23.0", "packed_gqa"), ("5.24.0", "packed_gqa"), ("5.30.0.dev0", "packed_gqa")],
)
def test_kernel_of_a_release(version, kernel):
    assert versions.matching_kernel(version) == kernel
    assert {versions.matching_kernel(version), versions.other_kernel(version)} == {"repeat_kv", "packed_gqa"}


@pytest.mark.parametrize("version", ["6.0.0", "3.5.1", "4.45.2", "5", "main", ""])
def test_unknown_release_is_refused(version):
    with pytest.raises(InputError, match=r"transformers version: expected .* found"):
        versions.matching_kernel(version)


def layer(number: float) -> SimpleNamespace:
    return SimpleNamespace(keys=torch.full((1, 1, 2, 4), number), values=torch.full((1, 1, 2, 4), -number))


def test_both_cache_interfaces_are_read():
    """Case 16."""
    layered = SimpleNamespace(layers=[layer(1.0), layer(2.0)])
    listed = SimpleNamespace(
        key_cache=[held.keys for held in layered.layers], value_cache=[held.values for held in layered.layers]
    )
    for cache in (layered, listed):
        read = versions.keys_and_values(cache)
        assert [float(key.mean()) for key, _ in read] == [1.0, 2.0]
        assert [float(value.mean()) for _, value in read] == [-1.0, -2.0]
        assert read[0][0] is layered.layers[0].keys, "a copy was read, not the cache's own tensor"


@pytest.mark.parametrize("cache", [SimpleNamespace(), SimpleNamespace(layers=[SimpleNamespace(kv=1)])])
def test_another_cache_interface_is_refused_with_the_version(cache):
    """Case 16."""
    with pytest.raises(InputError, match=f"transformers {versions.INSTALLED}: SimpleNamespace: expected .* neither"):
        versions.keys_and_values(cache)


def test_the_installed_cache_is_read():
    cache = versions.new_cache()
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    cache.update(keys, values, 0)
    cache.update(keys[:, :, :1], values[:, :, :1], 0)
    [(held_keys, held_values)] = versions.keys_and_values(cache)
    assert torch.equal(held_keys, torch.cat([keys, keys[:, :, :1]], dim=2))
    assert torch.equal(held_values, torch.cat([values, values[:, :, :1]], dim=2))


def test_argument_names_of_the_installed_release():
    model = versions.modeling_qwen2
    assert versions.cache_argument(model.Qwen2Model.forward) in ("cache", "past_key_values")
    assert versions.cache_argument(model.Qwen2Attention.forward) in ("cache", "past_key_values", "past_key_value")
    assert versions.last_logits_argument(model.Qwen2ForCausalLM.forward) in ("logits_to_keep", "num_logits_to_keep")
    with pytest.raises(InputError, match=f"transformers {versions.INSTALLED}: expected a cache argument"):
        versions.cache_argument(lambda hidden_states: hidden_states)
    with pytest.raises(InputError, match="expected logits_to_keep"):
        versions.last_logits_argument(lambda hidden_states: hidden_states)
