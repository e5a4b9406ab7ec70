"""Weights are copied as bytes: every row stands where it should, and memory holds a buffer."""

import hashlib
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from experiments.adapt.stream import Planned, plan_bytes, with_rows, write_stream
from minimodel.bits import same_bits
from minimodel.safetensors_file import table_of_contents
from tests.faults.forked import in_child, limit_memory
from tests.helpers import refused


@settings(max_examples=12)
@given(st.integers(1, 9), st.integers(0, 4), st.data())
def test_rows_are_moved_as_bytes(tmp_path_factory, rows, more, data):
    folder = tmp_path_factory.mktemp("rows")
    matrix_ = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    save_file({"m": matrix_, "n": torch.ones(5, dtype=torch.bfloat16)}, folder / "a.safetensors")
    entries = table_of_contents(folder / "a.safetensors")
    replaced = data.draw(st.sets(st.integers(0, rows - 1)))
    sources = {k: data.draw(st.integers(0, rows - 1)) for k in (*replaced, *range(rows, rows + more))}
    plan = {"n": Planned.copied(entries["n"]), "m": with_rows(entries["m"], rows + more, sources)}
    digest = write_stream(folder / "b.safetensors", plan)
    written = (folder / "b.safetensors").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest() and plan_bytes(plan) == len(written)
    found = load_file(folder / "b.safetensors")
    expected = torch.stack([matrix_[sources.get(k, k)] for k in range(rows + more)])
    assert same_bits(found["m"], expected) and same_bits(found["n"], torch.ones(5, dtype=torch.bfloat16))
    os.truncate(folder / "a.safetensors", entries["m"].start + 1)
    with refused("a.safetensors", "incomplete or damaged (ends "):
        write_stream(folder / "b.safetensors", plan)


@pytest.mark.slow
def test_copying_holds_a_buffer_and_not_the_weights(tmp_path):
    size = 1 << 30
    with open(tmp_path / "raw", "wb") as file:
        file.truncate(size)
    plan = {"t": Planned("BF16", (size // 2,), ((tmp_path / "raw", 0, size),))}

    def body():
        limit_memory(64 << 20)
        write_stream(tmp_path / "big.safetensors", plan)
        with pytest.raises(MemoryError):
            (tmp_path / "raw").read_bytes()  # the control
        return 0

    ended = in_child(body, tmp_path)
    assert ended.code == 0, ended
    assert table_of_contents(tmp_path / "big.safetensors")["t"].shape == (size // 2,)
