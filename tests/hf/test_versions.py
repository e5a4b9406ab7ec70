"""What differs between releases: kernels, argument names, how a cache is read, and how a model is loaded."""

import json
from types import SimpleNamespace

import pytest
import torch

from minimodel.errors import InputError
from tests.hf import versions
from tests.hf.reference import Reference, require_gradients_on, require_rope_base, rope_base
from tests.tiny import CONFIG, write_checkpoint


@pytest.mark.parametrize(
    ("kernel", "releases"),
    [("repeat_kv", ("4.46.3", "4.57.6", "5.3.0", "5.22.0")), ("packed_gqa", ("5.23.0", "5.24.0", "5.30.0.dev0"))],
)
def test_kernel_of_a_release(kernel, releases):
    for version in releases:
        assert versions.matching_kernel(version) == kernel
        assert {kernel, versions.other_kernel(version)} == {"repeat_kv", "packed_gqa"}


@pytest.mark.parametrize("version", ["6.0.0", "3.5.1", "4.45.2", "5", "main", ""])
def test_unknown_release_is_refused(version):
    with pytest.raises(InputError, match=r"transformers version: expected .* found"):
        versions.matching_kernel(version)


def test_both_cache_interfaces_are_read():
    """Case 16."""
    pairs = [(torch.full((1, 1, 2, 4), number), torch.full((1, 1, 2, 4), -number)) for number in (1.0, 2.0)]
    layered = SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=values) for keys, values in pairs])
    listed = SimpleNamespace(key_cache=[keys for keys, _ in pairs], value_cache=[values for _, values in pairs])
    for cache in (layered, listed):
        for read, held in zip(versions.keys_and_values(cache), pairs, strict=True):
            assert read[0] is held[0] and read[1] is held[1], "a copy was read, not the cache's own tensor"


@pytest.mark.parametrize("cache", [SimpleNamespace(), SimpleNamespace(layers=[SimpleNamespace(kv=1)])])
def test_another_cache_interface_is_refused_with_the_version(cache):
    """Case 16."""
    with pytest.raises(InputError, match=f"transformers {versions.INSTALLED}: SimpleNamespace: expected .* neither"):
        versions.keys_and_values(cache)


def test_the_installed_cache_and_argument_names_are_read():
    cache, pair = versions.new_cache(), (torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    cache.update(*pair, 0)
    cache.update(*(tensor[:, :, :1] for tensor in pair), 0)
    [held] = versions.keys_and_values(cache)
    assert all(torch.equal(h, torch.cat([t, t[:, :, :1]], dim=2)) for h, t in zip(held, pair))
    model = versions.modeling_qwen2
    for forward in (model.Qwen2Model.forward, model.Qwen2Attention.forward):
        assert versions.argument(forward, versions.CACHE) in versions.CACHE
    assert versions.argument(model.Qwen2ForCausalLM.forward, versions.LAST_LOGITS) in versions.LAST_LOGITS
    with pytest.raises(InputError, match="expected an argument cache, found hidden_states"):
        versions.argument(lambda hidden_states: hidden_states, versions.CACHE)


OLD, NEW = {"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


@pytest.fixture
def loaded(tmp_path):
    """Loads a stock checkpoint whose config.json spells the RoPE base so."""

    def load(spelling, dtype=torch.float32):
        directory = write_checkpoint(tmp_path / "c", stock=True)
        raw = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
        (directory / "config.json").write_text(json.dumps({**raw, **spelling}))
        return Reference(directory, dtype)

    return load


@pytest.mark.parametrize("spelling", [OLD, {**OLD, **NEW}], ids=["rope_theta", "both"])
def test_base_is_read(spelling, loaded):
    """`rope_theta` alone, which public Qwen2.5 checkpoints have, and both spellings reach every release as 1e6."""
    reference = loaded(spelling, torch.bfloat16)
    assert rope_base(reference.model) == pytest.approx(1e6, rel=1e-5)
    assert reference.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert reference.dtype == torch.bfloat16


def test_a_base_transformers_does_not_find_is_refused(loaded):
    """`rope_parameters` alone: release 5 reads it, release 4 rotates with 10,000 and says nothing; we do."""
    if versions.release(versions.INSTALLED) >= (5, 0):
        assert rope_base(loaded(NEW, torch.bfloat16).model) == pytest.approx(1e6, rel=1e-5)
    else:
        with pytest.raises(InputError, match=r"RoPE base: expected the checkpoint's 1e[+]06, found '10000'"):
            loaded(NEW, torch.bfloat16)


def test_a_wrong_base_rounded_frequencies_and_frozen_parameters_are_refused(loaded):
    """model.to(bfloat16) also rounds inv_freq, which from_pretrained(dtype=bfloat16) leaves in FP32. Frozen parameters
    give F.linear another path, and FP32 prefill logits other bits, than users of from_pretrained see."""
    reference = loaded(OLD)
    with pytest.raises(InputError, match=r"RoPE base: expected the checkpoint's 10000, found '1e[+]06'"):
        require_rope_base(reference.model, 10_000.0)
    reference.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"parameter lm_head.weight: expected requires_grad"):
        require_gradients_on(reference.model)
    exact = reference.model.model.rotary_emb.inv_freq.clone()
    rounded = reference.model.to(torch.bfloat16)
    assert not torch.equal(rounded.model.rotary_emb.inv_freq.float(), exact)
    with pytest.raises(InputError, match="RoPE"):
        require_rope_base(rounded, 1e6)
