"""A checkpoint directory: what must be there, what may not, its shards, and what its digests name."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from minimodel import checkpoint
from minimodel.checkpoint import expected_shapes, file_digests, open_checkpoint
from minimodel.config_file import read_config
from minimodel.load import decoder_from
from tests.conftest import numeric
from tests.helpers import edit_json, edit_tensors, random_tensor, read_json, refused
from tests.tiny import CONFIG, split_into_shards, write_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_an_adapted_and_a_stock_directory(directory, tmp_path):
    adapted, stock = open_checkpoint(directory), open_checkpoint(write_checkpoint(tmp_path / "stock", stock=True))
    assert adapted.contract is not None and stock.contract is None
    assert set(adapted.tensors) - set(stock.tensors) == {"role_embedding.weight"}
    assert adapted.tensors["role_embedding.weight"].shape == (14, 128)
    assert set(stock.tensors) == set(expected_shapes(read_config(CONFIG)))
    assert adapted.warnings == stock.warnings == ()


def test_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path, parts in (
        ("none", ("expected a checkpoint directory", "nothing")),
        ("file", ("expected a checkpoint directory", "a file")),
        ("", ("config.json", "nothing")),
    ):
        with refused(*parts):
            open_checkpoint(tmp_path / path)


BIAS, Q_NORM = "model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "parts"),
    [
        (BIAS, ..., (BIAS, "[64]", "none")),
        (BIAS, torch.zeros(65), ("model.safetensors", BIAS, "[64]", "[65]")),
        (Q_NORM, torch.zeros(32), ("model.safetensors", "q_norm")),
        ("lm_head.weight", ..., ("lm_head.weight", "[288, 128]", "none")),
    ],
)
def test_a_missing_a_strange_and_a_misshapen_tensor_are_refused_by_name(directory, name, tensor, parts):
    """Among them the head of an untied checkpoint: vllm-project/vllm 51665 (case 10)."""
    edit_tensors(directory / "model.safetensors", **{name: tensor})
    with refused(str(directory), *parts):
        open_checkpoint(directory)


def test_a_saved_inverse_frequency_buffer_is_left_out_with_a_warning(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory / "model.safetensors", **{name: torch.zeros(16)})
    opened = open_checkpoint(directory)
    assert name not in opened.tensors and any(name in warning for warning in opened.warnings)


def test_tied_with_another_head_in_the_file_keeps_it_with_a_warning(tmp_path):
    """vllm-project/vllm 51665 (case 10)."""
    directory = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    opened = open_checkpoint(directory)
    assert opened.warnings == () and "lm_head.weight" not in opened.tensors
    head = random_tensor(288, 128, dtype=torch.bfloat16)
    edit_tensors(directory / "model.safetensors", **{"lm_head.weight": head})
    opened = open_checkpoint(directory)
    assert "lm_head.weight" in opened.tensors
    assert any("lm_head.weight" in warning and "tie_word_embeddings" in warning for warning in opened.warnings)


@pytest.mark.parametrize("missing", ["contract.json", "role_embedding.safetensors"])
def test_role_table_and_contract_come_together(directory, missing):
    (directory / missing).unlink()
    with refused("role_embedding.safetensors", "contract.json", "only one"):
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
    assert list(single) == sorted(path.name for path in directory.iterdir()) and len(single) == 5
    assert single["config.json"] == hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
    split_into_shards(directory, 2)
    assert {*SHARDS, INDEX} <= set(file_digests(directory))
    edit_json(directory / "contract.json", role_offset=7)
    changed = file_digests(directory)
    assert changed["contract.json"] != single["contract.json"] and changed["config.json"] == single["config.json"]


@pytest.fixture
def sharded(directory):
    split_into_shards(directory, 2)
    return directory


@pytest.fixture
def unopened(sharded, monkeypatch):
    """A sharded checkpoint; a shard opened before the index has been checked is a failure."""
    open_checkpoint(sharded)
    (sharded.parent / "x.safetensors").write_bytes(b"x")
    (sharded / "inner.safetensors").symlink_to(sharded.parent / "x.safetensors")
    monkeypatch.setattr(checkpoint, "table_of_contents", None)
    return sharded


def weight_map(directory):
    return read_json(directory / INDEX)["weight_map"]


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        *(
            (name, "plain file name") for name in ("../x.safetensors", "/tmp/x.safetensors", "")
        ),  # more in test_files.py
        ("inner.safetensors", "inner.safetensors|link"),
        ("x", "'x'|no such file"),
    ],
)
def test_index_entries_that_name_no_file_of_the_directory_are_refused(unopened, file, parts):
    """huggingface/transformers 47176, sgl-project/sglang 32279 (case 11)."""
    edit_json(unopened / INDEX, weight_map={**weight_map(unopened), "model.norm.weight": file})
    with refused(str(unopened), *parts.split("|")):
        open_checkpoint(unopened)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", 3])
def test_an_index_without_a_map_is_refused(unopened, weight_map):
    edit_json(unopened / INDEX, weight_map=weight_map)
    with refused(INDEX, "weight_map"):
        open_checkpoint(unopened)


def test_an_index_that_misplaces_or_forgets_a_tensor_is_refused(sharded):
    """The other half of case 11: names that are files of the directory, and the wrong ones."""
    right, name = weight_map(sharded), "model.norm.weight"
    (other,) = {*SHARDS} - {right[name]}
    for wrong, part in (
        ({**right, name: other}, "none"),
        ({key: file for key, file in right.items() if key != name}, "does not place"),
    ):
        edit_json(sharded / INDEX, weight_map=wrong)
        with refused(name, part):
            open_checkpoint(sharded)
    edit_json(sharded / INDEX, weight_map=right)
    open_checkpoint(sharded)


def test_a_single_file_beside_an_index_is_read_where_the_index_names_it_alone(directory):
    """Some exporters write an index even for one file."""
    names = [name for name in open_checkpoint(directory).tensors if name != "role_embedding.weight"]
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert set(open_checkpoint(directory).tensors) == {*names, "role_embedding.weight"}
    assert {"model.safetensors", INDEX} <= set(file_digests(directory))
    edit_json(directory / INDEX, weight_map=dict.fromkeys(names[1:], "model.safetensors"))
    with refused(names[0], "does not place"):
        open_checkpoint(directory)
    single = (directory / "model.safetensors").read_bytes()
    split_into_shards(directory, 2)
    (directory / "model.safetensors").write_bytes(single)
    with refused("found both"):
        open_checkpoint(directory)


def load_and_digest(opened):
    """The control: as long as nothing changes the weights load and the digests are the directory's."""
    decoder_from(opened, numeric("bf16"))
    assert file_digests(opened) == file_digests(opened.directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARDS[1], "contract.json"])
def test_a_file_that_changed_after_the_checkpoint_was_opened_is_refused(sharded, name):
    """What a manifest records are the digests of what was read: nothing may change between the two."""
    opened, data = open_checkpoint(sharded), (sharded / name).read_bytes()
    load_and_digest(opened)
    (sharded / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("safetensors") else data)
    for step in (lambda: decoder_from(opened, numeric("bf16")), lambda: file_digests(opened)):
        with refused(name, "changed since"):
            step()
    load_and_digest(open_checkpoint(sharded))


def test_a_file_that_appears_or_goes_is_a_change_too(directory):
    opened, tokenizer = open_checkpoint(directory), directory / "tokenizer.json"
    data = tokenizer.read_bytes()
    tokenizer.unlink()
    with refused("tokenizer.json", "changed since"):
        file_digests(opened)
    without = open_checkpoint(directory)
    tokenizer.write_bytes(data)
    with refused("tokenizer.json", "changed since"):
        file_digests(without)
