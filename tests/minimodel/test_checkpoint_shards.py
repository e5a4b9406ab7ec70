"""The shard index: entries that lead elsewhere, shards that are missing, tensors that are not where it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from minimodel import checkpoint
from minimodel.checkpoint import open_checkpoint
from tests.helpers import edit_json, refused
from tests.tiny import split_into_shards


def index_with(directory: Path, file: Any) -> None:
    """Makes the index place one tensor in `file`."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def sharded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sharded checkpoint; a shard opened before the index has been checked is a failure."""
    split_into_shards(directory, 2)
    open_checkpoint(directory)

    def opened_too_early(*args: Any) -> None:
        raise AssertionError(f"opened before the whole index was checked: {args}")

    monkeypatch.setattr(checkpoint, "table_of_contents", opened_too_early)
    return directory


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..", "", "x\0y", "n" * 300, "\ud800", 5, None, []],
)
def test_index_entries_that_are_no_plain_file_names_are_refused(sharded: Path, file: Any) -> None:
    """huggingface/transformers 47176, sgl-project/sglang 32279 (case 11)."""
    (sharded.parent / "x.safetensors").write_bytes(b"x")
    index_with(sharded, file)
    with refused(str(sharded), "plain file name", repr(str(file)[:100])[1:-1]):
        open_checkpoint(sharded)


def test_an_index_entry_that_is_a_link_leading_outside_is_refused(sharded: Path) -> None:
    (sharded.parent / "x.safetensors").write_bytes(b"x")
    (sharded / "inner.safetensors").symlink_to(sharded.parent / "x.safetensors")
    index_with(sharded, "inner.safetensors")
    with refused("inner.safetensors", "link"):
        open_checkpoint(sharded)


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with refused("model-00002-of-00002.safetensors", "no such file"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", 3])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: Any) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with refused("model.safetensors.index.json", "weight_map"):
        open_checkpoint(sharded)


def test_an_index_that_misplaces_or_forgets_a_tensor_is_refused(directory: Path) -> None:
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


def test_a_single_file_beside_an_index_is_refused(directory: Path) -> None:
    single = (directory / "model.safetensors").read_bytes()
    split_into_shards(directory, 2)
    (directory / "model.safetensors").write_bytes(single)
    with refused("found both"):
        open_checkpoint(directory)
