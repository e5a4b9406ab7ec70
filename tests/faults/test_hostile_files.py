"""Hostile checkpoint files: pipes, names, depth and size end in one clear line, in bounded memory."""

import json
import math
import os
import resource

import pytest

from minimodel import load_model
from minimodel.checkpoint import expected_shapes, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.errors import refuse
from minimodel.files import MAX_JSON_BYTES, parse_json, read_json_object
from minimodel.safetensors_file import MAX_HEADER_BYTES, table_of_contents
from tests.conftest import numeric
from tests.faults.forked import in_child
from tests.faults.fuzz import Bases
from tests.helpers import edit_json, refused


def test_a_pipe_is_refused_and_not_waited_for(small, tmp_path):
    mine = small.copy(tmp_path)
    for name in ("model.safetensors", "config.json", "role_embedding.safetensors"):
        data = (mine.checkpoint / name).read_bytes()
        (mine.checkpoint / name).unlink()
        os.mkfifo(mine.checkpoint / name)
        with refused(name, "expected a file", "something else"):
            open_checkpoint(mine.checkpoint)
        (mine.checkpoint / name).unlink()
        (mine.checkpoint / name).write_bytes(data)


def test_a_file_name_with_control_characters_never_reaches_a_message(tmp_path):
    sharded = Bases(tmp_path).root / "sharded"
    name = "model\n\x1b[2J.safetensors"
    (sharded / "model-00001-of-00002.safetensors").rename(sharded / name)
    index = parse_json((sharded / "model.safetensors.index.json").read_bytes(), "index")
    renamed = {k: name if "00001" in v else v for k, v in index["weight_map"].items()}
    edit_json(sharded / "model.safetensors.index.json", weight_map=renamed)
    with refused("plain file name", r"\n\x1b[2J"):
        open_checkpoint(sharded)


def test_json_deep_enough_to_be_parsed_and_too_deep_to_be_shown():
    shown = []
    for depth in range(1000, 700, -1):
        try:
            value = parse_json(b"[" * depth + b"]" * depth, "x.json")
        except ValueError:
            continue
        shown.append("deeply nested" not in str(refuse("x.json", "a number", value)))
        if len(shown) == 30:
            break
    assert 0 < len(shown) < 300, "the depths must reach the limit of the parser"
    assert shown[-1], "a few steps below it everything can be shown"


@pytest.mark.slow
def test_memory_of_the_worst_small_files_is_bounded(tmp_path):
    """Lists in lists take fifty times their text. Files just below the limits are opened in less than 2 GB."""
    deep = b"[" * 150 + b"]" * 150 + b","
    json_file, header_file = tmp_path / "x.json", tmp_path / "x.safetensors"
    json_file.write_bytes(b'{"a": [' + deep * ((MAX_JSON_BYTES - 100) // len(deep)) + b"1]}")
    short = b"[" * 50 + b"]" * 50 + b","
    tensor = b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "x": ['
    header = tensor + short * ((MAX_HEADER_BYTES - 200) // len(short)) + b"1]}}"
    header_file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(header) > MAX_HEADER_BYTES - 1000

    def body():
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
        assert set(read_json_object(json_file)) == {"a"}
        assert set(table_of_contents(header_file)) == {"a"}
        return 0

    ended = in_child(body, tmp_path)
    assert ended.code == 0, ended
    header_file.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + header + bytes(1000))
    with refused("x.safetensors", "incomplete or damaged", f"a header of {MAX_HEADER_BYTES + 1} bytes"):
        table_of_contents(header_file)


def test_a_sparse_file_of_more_than_any_memory_is_refused(small, tmp_path):
    """A file of holes costs nothing on disk; what it claims must not end in a traceback."""
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "model.safetensors"
    edit_json(mine.checkpoint / "config.json", vocab_size=1 << 22, num_hidden_layers=1, hidden_size=1 << 16)
    shapes = expected_shapes(ModelConfig.from_dict(read_json_object(mine.checkpoint / "config.json")))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        os.truncate(path, 8 + len(text) + at)
    except OSError:
        pytest.skip("this file system has no such large files")
    (mine.checkpoint / "role_embedding.safetensors").unlink()
    (mine.checkpoint / "contract.json").unlink()

    def body():
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        with refused("model.safetensors: tensor model.embed_tokens.weight", "bytes of free memory, found less"):
            load_model(mine.checkpoint, numeric("bf16"))
        return 0

    ended = in_child(body, tmp_path)
    assert ended.code == 0, ended
