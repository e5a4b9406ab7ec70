"""Loading under transformers: the RoPE base in every spelling, FP32 frequencies, and what would go wrong silently."""

import json
from pathlib import Path

import pytest
import torch

from minimodel.errors import InputError
from tests.hf import versions
from tests.hf.reference import Reference, require_gradients_on, require_rope_base, rope_base
from tests.tiny import CONFIG, write_checkpoint

BASE = 1_000_000.0
assert CONFIG["rope_theta"] == BASE
OLD = {"rope_theta": BASE}
NEW = {"rope_parameters": {"rope_theta": BASE, "rope_type": "default"}}


def written(path: Path, spelling: dict) -> Path:
    """A stock checkpoint whose config.json spells the base so."""
    write_checkpoint(path, stock=True)
    raw = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    (path / "config.json").write_text(json.dumps({**raw, **spelling}))
    return path


@pytest.mark.parametrize("spelling", [OLD, {**OLD, **NEW}], ids=["rope_theta", "both"])
def test_base_is_read(spelling, tmp_path):
    """`rope_theta` alone, which public Qwen2.5 checkpoints have, and both spellings reach every release as 1e6."""
    reference = Reference(written(tmp_path / "c", spelling), torch.bfloat16)
    assert rope_base(reference.model) == pytest.approx(1e6, rel=1e-5)
    assert reference.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert reference.dtype == torch.bfloat16


def test_a_base_transformers_does_not_find_is_refused(tmp_path):
    """`rope_parameters` alone: release 5 reads it, release 4 rotates with 10,000 and says nothing; we do."""
    directory = written(tmp_path / "c", NEW)
    if versions.release(versions.INSTALLED) >= (5, 0):
        assert rope_base(Reference(directory, torch.bfloat16).model) == pytest.approx(1e6, rel=1e-5)
    else:
        with pytest.raises(InputError, match=r"RoPE base: expected the checkpoint's 1e[+]06, found '10000'"):
            Reference(directory, torch.bfloat16)


def test_a_wrong_base_is_refused(tmp_path):
    reference = Reference(written(tmp_path / "c", OLD), torch.float32)
    with pytest.raises(InputError, match=r"RoPE base: expected the checkpoint's 10000, found '1e[+]06'"):
        require_rope_base(reference.model, 10_000.0)


def test_frequencies_rounded_by_a_cast_are_refused(tmp_path):
    """model.to(bfloat16) also rounds inv_freq, which from_pretrained(dtype=bfloat16) leaves in FP32."""
    reference = Reference(written(tmp_path / "c", OLD), torch.float32)
    exact = reference.model.model.rotary_emb.inv_freq.clone()
    rounded = reference.model.to(torch.bfloat16)
    assert not torch.equal(rounded.model.rotary_emb.inv_freq.float(), exact)
    with pytest.raises(InputError, match="RoPE"):
        require_rope_base(rounded, BASE)


def test_frozen_parameters_are_refused(tmp_path):
    """They give F.linear another path, and FP32 prefill logits other bits, than users of from_pretrained see."""
    reference = Reference(written(tmp_path / "c", OLD), torch.float32)
    reference.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"parameter lm_head.weight: expected requires_grad"):
        require_gradients_on(reference.model)
