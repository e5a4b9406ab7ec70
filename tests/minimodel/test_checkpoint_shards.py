"""The shard index: entries that lead elsewhere, shards that are missing, tensors that are not where it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from minimodel import checkpoint
from minimodel.checkpoint import Checkpoint, file_digests, open_checkpoint
from minimodel.load import decoder_from
from tests.conftest import numeric
from tests.helpers import edit_json, refused
from tests.tiny import split_into_shards


def index_with(directory: Path, file: Any) -> None:
    """Makes the index place one tensor in `file`."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def sharded(directory, monkeypatch):
    """A sharded checkpoint; a shard opened before the index has been checked is a failure."""
    split_into_shards(directory, 2)
    open_checkpoint(directory)

    def opened_too_early(*args):
        raise AssertionError(f"opened before the whole index was checked: {args}")

    monkeypatch.setattr(checkpoint, "table_of_contents", opened_too_early)
    return directory


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..", "", "x\0y", "n" * 300, "\ud800", 5, None, []],
)
def test_index_entries_that_are_no_plain_file_names_are_refused(sharded, file):
    """huggingface/transformers 47176, sgl-project/sglang 32279 (case 11)."""
    (sharded.parent / "x.safetensors").write_bytes(b"x")
    index_with(sharded, file)
    with refused(str(sharded), "plain file name", repr(str(file)[:100])[1:-1]):
        open_checkpoint(sharded)


def test_an_index_entry_that_is_a_link_leading_outside_is_refused(sharded):
    (sharded.parent / "x.safetensors").write_bytes(b"x")
    (sharded / "inner.safetensors").symlink_to(sharded.parent / "x.safetensors")
    index_with(sharded, "inner.safetensors")
    with refused("inner.safetensors", "link"):
        open_checkpoint(sharded)


def test_a_missing_shard_is_refused(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with refused("model-00002-of-00002.safetensors", "no such file"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", 3])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with refused("model.safetensors.index.json", "weight_map"):
        open_checkpoint(sharded)


def test_an_index_that_misplaces_or_forgets_a_tensor_is_refused(directory):
    split_into_shards(directory, 2)
    path = directory / "model.safetensors.index.json"
    right = json.loads(path.read_text())["weight_map"]
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {right["model.norm.weight"]}
    edit_json(path, weight_map={**right, "model.norm.weight": other.pop()})
    with refused("model.norm.weight", "none"):
        open_checkpoint(directory)
    edit_json(path, weight_map={name: file for name, file in right.items() if name != "model.norm.weight"})
    with refused("model.norm.weight", "does not place"):
        open_checkpoint(directory)
    edit_json(path, weight_map=right)
    open_checkpoint(directory)


def test_a_single_file_beside_an_index_is_refused(directory):
    single = (directory / "model.safetensors").read_bytes()
    split_into_shards(directory, 2)
    (directory / "model.safetensors").write_bytes(single)
    with refused("found both"):
        open_checkpoint(directory)


def test_a_single_file_beside_an_index_that_names_it_alone_is_read(directory):
    """Some exporters write an index even for one file."""
    names = list(open_checkpoint(directory).tensors)
    names.remove("role_embedding.weight")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert set(open_checkpoint(directory).tensors) == {*names, "role_embedding.weight"}
    assert {"model.safetensors", "model.safetensors.index.json"} <= set(file_digests(directory))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], "model.safetensors")}))
    with refused(names[0], "does not place"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors", "contract.json"])
def test_a_file_that_changed_after_the_checkpoint_was_opened_is_refused(directory, name):
    """What a manifest records are the digests of what was read: nothing may change between the two."""
    split_into_shards(directory, 2)
    checkpoint = open_checkpoint(directory)
    load_and_digest(checkpoint)
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("safetensors") else data)
    for step in (lambda: decoder_from(checkpoint, numeric("bf16")), lambda: file_digests(checkpoint)):
        with refused(name, "changed since"):
            step()
    load_and_digest(open_checkpoint(directory))


def test_a_file_that_appears_or_goes_is_a_change_too(directory):
    checkpoint = open_checkpoint(directory)
    tokenizer = directory / "tokenizer.json"
    data = tokenizer.read_bytes()
    tokenizer.unlink()
    with refused("tokenizer.json", "changed since"):
        file_digests(checkpoint)
    without = open_checkpoint(directory)
    tokenizer.write_bytes(data)
    with refused("tokenizer.json", "changed since"):
        file_digests(without)


def load_and_digest(checkpoint: Checkpoint) -> None:
    """The control: as long as nothing changes the weights load and the digests are the directory's."""
    decoder_from(checkpoint, numeric("bf16"))
    assert file_digests(checkpoint) == file_digests(checkpoint.directory)
