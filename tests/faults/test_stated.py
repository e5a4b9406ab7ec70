"""Faults that people met in public, with the inputs that they stated."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests.faults.conftest import CAPS, SMALL, Small
from tests.helpers import random_tensor
from tests.tiny import write_checkpoint


def test_the_warning_about_a_head_beside_a_tied_flag_is_in_the_manifest(small, tmp_path):
    """vllm-project/vllm 51665 (case 10): never dropped silently."""
    mine = Small(tmp_path, small.tasks)
    write_checkpoint(mine.checkpoint, config={**SMALL, "tie_word_embeddings": True}, contract={"caps": CAPS})
    path = mine.checkpoint / "model.safetensors"
    assert mine.run(tmp_path / "tied", "--limit", 1).code == 0
    assert json.loads((tmp_path / "tied/manifest.json").read_text())["checkpoint_warnings"] == []
    head = random_tensor(288, SMALL["hidden_size"], dtype=torch.bfloat16)
    save_file({**load_file(path), "lm_head.weight": head}, path)
    assert mine.run(tmp_path / "head", "--limit", 1).code == 0
    [warning] = json.loads((tmp_path / "head/manifest.json").read_text())["checkpoint_warnings"]
    assert "tie_word_embeddings is true" in warning and "the file's head is used" in warning
    rows = [(tmp_path / name / "rows.jsonl").read_bytes() for name in ("tied", "head")]
    assert rows[0] != rows[1]


def test_a_cast_that_changes_values_is_named_in_the_manifest(small, tmp_path):
    """A BF16 checkpoint with a value below FP16's smallest: FP16 loses it, FP32 does not."""
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 1e-9
    save_file(tensors, path)
    warnings = {}
    for dtype in ("fp16", "fp32"):
        assert mine.run(tmp_path / dtype, "--limit", 1, "--dtype", dtype).code == 0
        warnings[dtype] = json.loads((tmp_path / dtype / "manifest.json").read_text())["checkpoint_warnings"]
    assert warnings["fp32"] == []
    [warning] = warnings["fp16"]
    assert warning.startswith("read as float16 from BF16, ") and "model.norm.weight (1 of " in warning
