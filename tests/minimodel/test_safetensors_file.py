"""One safetensors file: damaged bytes are refused in one line with the file's name, dtypes are converted or refused."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from minimodel import safetensors_file
from minimodel.bits import same_bits
from minimodel.safetensors_file import read_into, table_of_contents
from tests.helpers import DTYPES, random_tensor, refused

TENSORS = {"a": random_tensor(3, 4), "b": random_tensor(5, dtype=torch.bfloat16, seed=1)}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    return tmp_path / "weights.safetensors"


def raw_file(header, data):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


ENTRY = b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
TWICE = b"{" + ENTRY + b", " + ENTRY + b"}"
DAMAGE = {
    "last 4 bytes cut": lambda b: b[:-4],
    "16 bytes appended": lambda b: b + bytes(16),
    "empty": lambda b: b"",
    "header length 2^60": lambda b: struct.pack("<Q", 1 << 60) + b[8:],
    "header length beyond the file": lambda b: struct.pack("<Q", len(b)) + b[8:],
    "header cut": lambda b: b[:20],
    "only half a length": lambda b: b[:4],
    "not JSON": lambda b: raw_file(b"{]", b""),
    "not UTF-8": lambda b: raw_file(b'{"\xff": 1}', b""),
    "a JSON list": lambda b: raw_file(b"[]", b""),
    "a deep header": lambda b: raw_file(b'{"a":' * 5000, b""),
    "overlapping ranges": lambda b: raw_file({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "the same range twice": lambda b: raw_file({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)),
    "one name twice, one range": lambda b: raw_file(TWICE, bytes(8)),
    "one name twice, two ranges": lambda b: raw_file(TWICE.replace(b"[0, 8]}}", b"[8, 16]}}"), bytes(16)),
    "a hole between ranges": lambda b: raw_file({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
    "range and shape disagree": lambda b: raw_file({"a": entry(0, 8, (3,))}, bytes(8)),
    "a negative offset": lambda b: raw_file({"a": entry(-8, 0)}, bytes(8)),
    "a huge shape": lambda b: raw_file({"a": entry(0, 8, (1 << 62, 8))}, bytes(8)),
    "an unknown dtype": lambda b: raw_file({"a": entry(0, 8, dtype="F31")}, bytes(8)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_with_their_name(path, kind):
    """comfyanonymous/ComfyUI 6744 (case 12)."""
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with refused(str(path), "incomplete or damaged"):
        table_of_contents(path)


def test_an_undamaged_hand_made_file_is_read_and_a_missing_one_is_refused(path):
    """The control of the list above: the same maker, nothing wrong."""
    path.write_bytes(raw_file(b"{" + ENTRY + b"}", bytes(8)))
    assert set(table_of_contents(path)) == {"a"}
    path.write_bytes(raw_file({"a": entry(0, 8), "b": entry(8, 16)}, struct.pack("<4f", 1, 2, 3, 4)))
    target = torch.empty(2)
    read_into(table_of_contents(path)["b"], target)
    assert target.tolist() == [3.0, 4.0]
    path.unlink()
    with refused("weights.safetensors", "found nothing"):
        table_of_contents(path)


@given(cut=st.integers(0, 300), junk=st.binary(max_size=20))
def test_no_cut_and_no_junk_passes_for_a_whole_file(tmp_path_factory, cut, junk):
    """The same report (case 12)."""
    path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))] + junk)
    if path.read_bytes() != whole:
        with refused(str(path), "incomplete or damaged"):
            table_of_contents(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_after_it_was_opened_is_refused(path, dtype):
    item = table_of_contents(path)["a"]
    path.write_bytes(path.read_bytes()[: item.stop - 4])
    with refused(str(path), "tensor a ends early"):
        read_into(item, torch.empty(3, 4, dtype=dtype))


def reread(path, saved, dtype):
    """The tensor through a file into one of `dtype`."""
    save_file({"x": saved}, path / "x.safetensors")
    read = torch.empty(saved.shape, dtype=dtype)
    read_into(table_of_contents(path / "x.safetensors")["x"], read)
    return read


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_another_dtype_is_converted_as_tensor_to_does_in_one_part_or_many(tmp_path, source, target, monkeypatch):
    saved = random_tensor(5 * 2048 + 123, dtype=source)
    for stage in (safetensors_file.STAGE_BYTES, 4096):  # whole, and in parts of a small staging buffer
        monkeypatch.setattr(safetensors_file, "STAGE_BYTES", stage)
        assert same_bits(reread(tmp_path, saved, target), saved.to(target))


def test_fp32_to_bf16_is_one_rounding_to_nearest_even(tmp_path):
    values = random_tensor(4096)
    raw = values.numpy().view(np.uint32).astype(np.uint64)
    rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    found = reread(tmp_path, values, torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(found, rounded)
    assert not np.array_equal(rounded, (raw >> 16).astype(np.uint16)), "truncation would be another value"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL")],
)
def test_tensors_that_are_no_plain_floats_are_refused_by_dtype(tmp_path, dtype, name):
    with refused("x.safetensors", "tensor x", "BF16, F16, F32 or F64", name):
        reread(tmp_path, torch.zeros(4).to(dtype), torch.float32)
