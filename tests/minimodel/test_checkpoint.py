"""A checkpoint directory: what must be there, what may not, and what its digests name."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimodel.checkpoint import expected_shapes, file_digests, open_checkpoint
from minimodel.config import ModelConfig
from tests.helpers import edit_json, random_tensor, refused
from tests.tiny import CONFIG, split_into_shards, write_checkpoint


def rewrite(directory: Path, change: dict[str, Tensor | None], file: str = "model.safetensors") -> None:
    """Replaces, adds or (None) removes tensors of a weights file."""
    tensors: dict[str, Any] = {**load_file(directory / file), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / file)


def test_an_adapted_and_a_stock_directory(directory, tmp_path):
    adapted, stock = open_checkpoint(directory), open_checkpoint(write_checkpoint(tmp_path / "stock", stock=True))
    assert adapted.contract is not None and stock.contract is None
    assert set(adapted.tensors) - set(stock.tensors) == {"role_embedding.weight"}
    assert adapted.tensors["role_embedding.weight"].shape == (14, 128)
    assert set(stock.tensors) == set(expected_shapes(ModelConfig.from_dict(CONFIG)))
    assert adapted.warnings == stock.warnings == ()


def test_no_directory_is_refused(tmp_path):
    with refused("expected a checkpoint directory", "nothing"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "file").touch()
    with refused("expected a checkpoint directory", "a file"):
        open_checkpoint(tmp_path / "file")
    with refused("config.json", "nothing"):
        open_checkpoint(tmp_path)


def test_a_missing_a_strange_and_a_misshapen_tensor_are_refused_by_name(directory):
    name = "model.layers.1.self_attn.k_proj.bias"
    whole = (directory / "model.safetensors").read_bytes()
    rewrite(directory, {name: None})
    with refused(str(directory), name, "[64]", "none"):
        open_checkpoint(directory)
    (directory / "model.safetensors").write_bytes(whole)
    rewrite(directory, {name: torch.zeros(65)})
    with refused("model.safetensors", name, "[64]", "[65]"):
        open_checkpoint(directory)
    (directory / "model.safetensors").write_bytes(whole)
    rewrite(directory, {"model.layers.1.self_attn.q_norm.weight": torch.zeros(32)})
    with refused("model.safetensors", "q_norm"):
        open_checkpoint(directory)


def test_a_saved_inverse_frequency_buffer_is_left_out_with_a_warning(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, {name: torch.zeros(16)})
    opened = open_checkpoint(directory)
    assert name not in opened.tensors and any(name in warning for warning in opened.warnings)


def test_tied_with_another_head_in_the_file_keeps_it_with_a_warning(tmp_path):
    """vllm-project/vllm 51665 (case 10)."""
    directory = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    assert open_checkpoint(directory).warnings == ()
    assert "lm_head.weight" not in open_checkpoint(directory).tensors
    rewrite(directory, {"lm_head.weight": random_tensor(288, 128, dtype=torch.bfloat16)})
    opened = open_checkpoint(directory)
    assert "lm_head.weight" in opened.tensors
    assert any("lm_head.weight" in warning and "tie_word_embeddings" in warning for warning in opened.warnings)


def test_untied_without_a_head_is_refused(directory):
    """vllm-project/vllm 51665, the other half (case 10)."""
    rewrite(directory, {"lm_head.weight": None})
    with refused("lm_head.weight", "[288, 128]", "none"):
        open_checkpoint(directory)


def test_role_table_and_contract_come_together(directory):
    contract = (directory / "contract.json").read_bytes()
    (directory / "contract.json").unlink()
    with refused("role_embedding.safetensors", "contract.json", "only one"):
        open_checkpoint(directory)
    (directory / "contract.json").write_bytes(contract)
    (directory / "role_embedding.safetensors").unlink()
    with refused("only one"):
        open_checkpoint(directory)


def test_a_pickled_role_table_is_never_read_and_the_command_is_named(directory):
    (directory / "role_embedding.safetensors").unlink()
    (directory / "role_embedding.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with refused("role_embedding.pt", "pickles are never read", "python -m experiments.adapt"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"weights": torch.zeros(14, 128)}, "weights"),
        ({"weight": torch.zeros(14, 128), "bias": torch.zeros(14)}, "bias"),
        ({"weight": torch.zeros(14, 64)}, "[14, 64]"),
        ({"weight": torch.zeros(14 * 128)}, "[1792]"),
        ({"weight": torch.zeros(13, 128)}, "at least 14"),
    ],
)
def test_a_role_table_of_another_shape_is_refused(directory, tensors, part):
    save_file(tensors, directory / "role_embedding.safetensors")
    with refused("role_embedding.safetensors", part):
        open_checkpoint(directory)


def test_rows_needed_follow_the_contracts_offset(directory):
    edit_json(directory / "contract.json", role_offset=9)
    with refused("at least 15", "14"):
        open_checkpoint(directory)
    edit_json(directory / "contract.json", role_offset=0)
    open_checkpoint(directory)


def test_digests_name_every_file_that_decides_a_bit(directory):
    single = file_digests(directory)
    assert list(single) == [
        "config.json",
        "contract.json",
        "model.safetensors",
        "role_embedding.safetensors",
        "tokenizer.json",
    ]
    assert single["config.json"] == hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
    split_into_shards(directory, 2)
    assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= set(file_digests(directory))
    edit_json(directory / "contract.json", role_offset=7)
    changed = file_digests(directory)
    assert changed["contract.json"] != single["contract.json"] and changed["config.json"] == single["config.json"]
