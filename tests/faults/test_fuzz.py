"""Hostile checkpoints: a model, or one clear line. `python -m tests.faults.fuzz` opens as many as one likes."""

import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest

import tests.faults.fuzz as module
from decode import Contract
from decode.text import load_tokenizer
from minimodel import load_model
from minimodel.checkpoint import expected_shapes, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.errors import refuse
from minimodel.files import MAX_JSON_BYTES, parse_json, read_json_object
from minimodel.safetensors_file import MAX_HEADER_BYTES, table_of_contents
from tests.conftest import numeric
from tests.faults.conftest import Small
from tests.faults.forked import in_child
from tests.faults.fuzz import Bases, Findings, fuzz, watch_reads
from tests.helpers import edit_json, refused


def require_sound(findings: Findings, inputs: int) -> None:
    assert findings.faults == []
    assert findings.inputs == inputs
    assert findings.peak_bytes < 2 << 30
    files = {name for name, _ in findings.outcomes}
    assert {"config.json", "contract.json", "tokenizer.json", "model.safetensors.index.json"} <= files
    for name in files:  # neither does everything pass, nor is everything refused, or the inputs would show nothing
        assert findings.outcomes[name, "refused"] > 0, name
    assert sum(count for (_, outcome), count in findings.outcomes.items() if outcome == "opened") > inputs // 50


def test_hostile_checkpoints(tmp_path: Path) -> None:
    require_sound(fuzz(tmp_path, 300, seed=7), 300)


@pytest.mark.slow
def test_many_hostile_checkpoints(tmp_path: Path) -> None:
    """STAGE_REPLAY_FUZZ sets how many; 20,000 without it."""
    inputs = int(os.environ.get("STAGE_REPLAY_FUZZ", "20000"))
    require_sound(fuzz(tmp_path, inputs, seed=8), inputs)


def test_the_fuzzer_sees_every_kind_of_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an opener with one defect of each kind, one input each."""
    kind, index, real = ["KeyError", "outside", "lines", "killed", "memory", "fine"], 0, Bases.write

    def write(self: Bases, seed: int, number: int) -> tuple[Path, str]:
        nonlocal index
        index = number
        return real(self, seed, number)

    def broken(directory: Path) -> str:
        if kind[index] == "KeyError":
            raise KeyError("shape")
        if kind[index] == "outside":
            (directory.parent / "outside.safetensors").read_bytes()
        assert kind[index] != "lines", "not one line"
        if kind[index] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind[index] == "memory":
            bytearray(3 << 30)
        return "opened"

    monkeypatch.setattr(Bases, "write", write)
    monkeypatch.setattr(module, "open_all", broken)
    findings = fuzz(tmp_path, 6, seed=0)
    expected = ["FAULT KeyError", "read outside", "FAULT AssertionError", "SIGKILL", "FAULT MemoryError"]
    assert len(findings.faults) == 5, findings.faults
    for fault, part in zip(findings.faults, expected):
        assert part in fault


def test_reads_outside_are_seen_and_reads_inside_are_not(tmp_path: Path) -> None:
    bases = Bases(tmp_path)
    directory, _ = bases.write(0, 0)

    def body() -> int:
        outside = watch_reads(directory)
        module.switch[0] = True
        (directory / "config.json").read_bytes()
        inside = len(outside)
        table_of_contents(tmp_path / "outside.safetensors")
        return 0 if inside == 0 and len(outside) == 2 else 1

    assert in_child(body, tmp_path).code == 0


def test_a_pipe_is_refused_and_not_waited_for(small: Small, tmp_path: Path) -> None:
    mine = small.copy(tmp_path)
    for name in ("model.safetensors", "config.json", "role_embedding.safetensors"):
        data = (mine.checkpoint / name).read_bytes()
        (mine.checkpoint / name).unlink()
        os.mkfifo(mine.checkpoint / name)
        with refused(name, "expected a file", "something else"):
            open_checkpoint(mine.checkpoint)
        (mine.checkpoint / name).unlink()
        (mine.checkpoint / name).write_bytes(data)


def test_a_file_name_with_control_characters_never_reaches_a_message(tmp_path: Path) -> None:
    sharded = Bases(tmp_path).root / "sharded"
    name = "model\n\x1b[2J.safetensors"
    (sharded / "model-00001-of-00002.safetensors").rename(sharded / name)
    index = parse_json((sharded / "model.safetensors.index.json").read_bytes(), "index")
    renamed = {k: name if "00001" in v else v for k, v in index["weight_map"].items()}
    edit_json(sharded / "model.safetensors.index.json", weight_map=renamed)
    with refused("plain file name", r"\n\x1b[2J"):
        open_checkpoint(sharded)


def test_json_deep_enough_to_be_parsed_and_too_deep_to_be_shown() -> None:
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
def test_memory_of_the_worst_small_files_is_bounded(tmp_path: Path) -> None:
    """Lists in lists take fifty times their text. Files just below the limits are opened in less than 2 GB."""
    deep = b"[" * 150 + b"]" * 150 + b","
    json_file, header_file = tmp_path / "x.json", tmp_path / "x.safetensors"
    json_file.write_bytes(b'{"a": [' + deep * ((MAX_JSON_BYTES - 100) // len(deep)) + b"1]}")
    short = b"[" * 50 + b"]" * 50 + b","
    tensor = b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "x": ['
    header = tensor + short * ((MAX_HEADER_BYTES - 200) // len(short)) + b"1]}}"
    header_file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(header) > MAX_HEADER_BYTES - 1000

    def body() -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
        assert set(read_json_object(json_file)) == {"a"}
        assert set(table_of_contents(header_file)) == {"a"}
        return 0

    ended = in_child(body, tmp_path)
    assert ended.code == 0, ended
    header_file.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + header + bytes(1000))
    with refused("x.safetensors", "incomplete or damaged", f"a header of {MAX_HEADER_BYTES + 1} bytes"):
        table_of_contents(header_file)


PARTS = {
    "a chain that makes gigabytes of one letter": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40,
            }
        },
        "normalizer: expected a part of byte-level BPE",
    ),
    "a part whose file panics the library": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "not a tokenizer (Precompiled",
    ),
    "a part that panics in use": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pre_tokenizer: expected"),
    "a part that loses text": ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer: expected"),
    "a decoder that panics": (
        {"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}},
        "decoder: expected",
    ),
    "another model": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []},
        "model: expected BPE",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_tokenizers_of_another_kind_are_refused_by_their_part(small: Small, tmp_path: Path, kind: str) -> None:
    mine = small.copy(tmp_path)
    change, message = PARTS[kind]
    edit_json(mine.checkpoint / "tokenizer.json", **change)
    with refused("tokenizer.json", message):
        Contract.load(mine.checkpoint)


def test_a_tokenizer_that_drops_merges_at_random_is_refused(small: Small, tmp_path: Path) -> None:
    """BPE dropout would give one text other tokens on every run."""
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "tokenizer.json"
    model = parse_json(path.read_bytes(), path)["model"]
    edit_json(path, model={**model, "dropout": 0.0})
    load_tokenizer(path)
    edit_json(path, model={**model, "dropout": 0.5})
    with refused("tokenizer.json: model dropout", "0.5"):
        Contract.load(mine.checkpoint)


def test_a_regular_expression_without_end_is_refused_per_row(small: Small, tmp_path: Path) -> None:
    """The library panics when its search gives up; that is one line too."""
    mine = small.copy(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    edit_json(mine.checkpoint / "tokenizer.json", pre_tokenizer=split)
    codec = Contract.load(mine.checkpoint).codec
    with refused("text: the tokenizer cannot encode it", "retry-limit"):
        codec.encode("x" * 60)


def test_a_delimiter_that_is_no_text_is_refused(small: Small, tmp_path: Path) -> None:
    mine = small.copy(tmp_path)
    names = [f"<|{name}|>" for name in ("prompt", "branch_1", "branch_2", "branch_3", "merge")]
    edit_json(mine.checkpoint / "contract.json", delimiters={"open": ["\ud800", *names]})
    with refused("contract.json: delimiter '\\ud800'"):
        Contract.load(mine.checkpoint)


def test_a_sparse_file_of_more_than_any_memory_is_refused(small: Small, tmp_path: Path) -> None:
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

    def body() -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        with refused("model.safetensors: tensor model.embed_tokens.weight", "bytes of free memory, found less"):
            load_model(mine.checkpoint, numeric("bf16"))
        return 0

    ended = in_child(body, tmp_path)
    assert ended.code == 0, ended
