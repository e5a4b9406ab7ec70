"""Loading: whole files or shards, any float dtype into any other, nothing partial, and no more memory than promised."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimodel import Decoder, load_model
from minimodel.bits import all_finite, bits, same_bits
from minimodel.checkpoint import open_checkpoint
from minimodel.load import decoder_from
from minimodel.safetensors_file import FILE_DTYPES, casts_exactly
from tests.conftest import numeric
from tests.helpers import edit_json, random_tensor, refused
from tests.tiny import split_into_shards, write_checkpoint

IDS = torch.tensor([[5, 9, 200, 31, 31, 7]])
ROLES = torch.tensor([[0, 0, 1, 4, 5, 5]])
POSITIONS = torch.arange(6)[None]


def logits(model: Decoder, stock: bool = False) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model(IDS, None if stock else ROLES, POSITIONS, None))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_give_the_bits_of_the_single_file(tmp_path, dtype, shards):
    directory = write_checkpoint(tmp_path / "tiny")
    single = logits(load_model(directory, numeric(dtype)))
    split_into_shards(directory, shards)
    assert same_bits(logits(load_model(directory, numeric(dtype))), single)
    other = write_checkpoint(tmp_path / "other", seed=1)
    assert not same_bits(logits(load_model(other, numeric(dtype))), single)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_bf16_file_in_a_wider_model_keeps_every_value(tiny_directory, dtype):
    model = load_model(tiny_directory, numeric(dtype), copies=1)
    saved = load_file(tiny_directory / "model.safetensors")
    table = load_file(tiny_directory / "role_embedding.safetensors")["weight"]
    assert model.role_embedding is not None
    assert same_bits(model.embed_tokens, saved["model.embed_tokens.weight"].to(model.numeric.torch_dtype))
    assert same_bits(model.role_embedding, table.to(model.numeric.torch_dtype))
    assert logits(model).dtype == model.numeric.torch_dtype


def test_a_wider_file_in_a_bf16_model_is_rounded_as_if_it_had_been_saved_so(tmp_path):
    wide, narrow = (write_checkpoint(tmp_path / str(dtype), dtype) for dtype in (torch.float32, torch.bfloat16))
    assert same_bits(logits(load_model(wide, numeric("bf16"))), logits(load_model(narrow, numeric("bf16"))))
    assert not same_bits(logits(load_model(wide, numeric("fp32"))), logits(load_model(narrow, numeric("fp32"))))


def test_tied_and_untied_heads(tmp_path):
    """vllm-project/vllm 51665 (case 10): the head in the file is used, whatever the flag says."""
    tied = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    own = logits(load_model(tied, numeric("fp32")), stock=True)
    tensors = load_file(tied / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], random_tensor(288, 128, dtype=torch.bfloat16)
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tied / "model.safetensors")
    assert same_bits(logits(load_model(tied, numeric("fp32")), stock=True), own)
    save_file({**tensors, "lm_head.weight": head}, tied / "model.safetensors")
    with_head = logits(load_model(tied, numeric("fp32")), stock=True)
    assert not same_bits(with_head, own)
    edit_json(tied / "config.json", tie_word_embeddings=False)
    assert same_bits(logits(load_model(tied, numeric("fp32")), stock=True), with_head)


def test_the_window_number_alone_does_not_move_a_bit(tmp_path):
    """huggingface/transformers 38002 (case 9)."""
    directory = write_checkpoint(tmp_path / "tiny")
    without = logits(load_model(directory, numeric("bf16")))
    edit_json(directory / "config.json", sliding_window=4)
    assert same_bits(logits(load_model(directory, numeric("bf16"))), without)
    edit_json(directory / "config.json", rope_theta=10000.0)
    assert not same_bits(logits(load_model(directory, numeric("bf16"))), without)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("file", ["model.safetensors", "role_embedding.safetensors"])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, file, value):
    directory = write_checkpoint(tmp_path / "tiny")
    tensors = load_file(directory / file)
    name = "weight" if "role" in file else "model.layers.2.mlp.up_proj.weight"
    tensors[name].view(-1)[77] = value
    save_file(tensors, directory / file)
    with refused(file, f"tensor {name}", "finite"):
        load_model(directory, numeric("bf16"))


def test_a_value_beyond_fp16_is_refused_not_turned_into_infinity(tmp_path):
    directory = write_checkpoint(tmp_path / "tiny")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, directory / "model.safetensors")
    load_model(directory, numeric("bf16"))
    with refused("tensor model.norm.weight", "finite"):
        load_model(directory, numeric("fp16"))


def test_an_fp8_tensor_is_refused_by_dtype(tmp_path):
    directory = write_checkpoint(tmp_path / "tiny")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")
    with refused("model.safetensors", name, "F8_E4M3"):
        load_model(directory, numeric("bf16"))


def test_a_damaged_weights_file_gives_no_model(tmp_path):
    """comfyanonymous/ComfyUI 6744 (case 12)."""
    directory = write_checkpoint(tmp_path / "tiny")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with refused(str(path), "incomplete or damaged"):
        load_model(directory, numeric("bf16"))


def test_finiteness_of_any_dtype_and_of_nothing():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        good = random_tensor(100, dtype=dtype)
        assert all_finite(good) and all_finite(good[:0])
        for value in (float("nan"), float("inf"), float("-inf")):
            bad = good.clone()
            bad[63] = value
            assert not all_finite(bad)
    subnormal = torch.zeros(4, dtype=torch.bfloat16)
    bits(subnormal)[2] = 1
    assert all_finite(subnormal)


# VmHWM and not ru_maxrss, which a process inherits from the one that started it
LOAD = r"""
import re, sys, torch
from minimodel import NumericContract, load_model
if sys.argv[2] == "load_model":
    copies = int(sys.argv[5])
    model = load_model(sys.argv[1], NumericContract(dtype=sys.argv[3], threads=1, linear=sys.argv[4]), copies)
else:
    from safetensors.torch import load_file
    weights = {k: v.to(torch.float32) + 0 for k, v in load_file(sys.argv[1] + "/model.safetensors").items()}
print(int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading(tmp_path):
    """At most 1.1 times the weights plus 300 MB, in a process of its own; a plain load_file and `.to` takes more. The
    check of equal copies adds a layer, a head and 100 MB."""
    size = {"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    directory = write_checkpoint(tmp_path / "large", config=size)
    stored = (directory / "model.safetensors").stat().st_size
    assert stored > 200e6

    def peak(*arguments):
        done = subprocess.run(
            [sys.executable, "-c", LOAD, str(directory), *arguments], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    plain = peak("load_model", "bf16", "plain", "1")
    assert plain <= 1.1 * stored + 300e6
    assert peak("load_model", "fp32", "plain", "1") <= 1.1 * 2 * stored + 300e6
    head = 2 * size["vocab_size"] * size["hidden_size"]
    layer = (stored - head) / size["num_hidden_layers"]
    assert peak("load_model", "bf16", "plain", "2") <= plain + head + layer + 100e6
    # packing holds one product's weights twice, its check once more, the head's first; oneDNN keeps buffers of the 20
    # row counts that the check tries, for each of five shapes
    assert peak("load_model", "bf16", "packed", "1") < plain + 2 * head + 350e6
    assert peak("load_file") > 1.1 * 2 * stored + 300e6, "the measurement must see a second copy"


@pytest.mark.parametrize("file_dtype", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_values_that_a_cast_changes_are_counted_by_tensor(tmp_path, file_dtype, dtype):
    """The load and a scan without a load count the same; a tensor whose values all survive is not named."""
    directory, target = write_checkpoint(tmp_path / "checkpoint", torch.float32, stock=True), numeric(dtype)
    tensors = load_file(directory / "model.safetensors")
    stored = {name: (tensor.double() * 1.1).to(FILE_DTYPES[file_dtype]) for name, tensor in tensors.items()}
    stored["model.norm.weight"].fill_(0.5)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    expected = {}
    for name, tensor in stored.items():
        values = zip(tensor.flatten().tolist(), tensor.to(target.torch_dtype).flatten().tolist())
        expected[name] = sum(before != after for before, after in values)
    scanned, loaded = open_checkpoint(directory), open_checkpoint(directory)
    decoder_from(loaded, target)
    warnings = loaded.cast_warnings(target.torch_dtype)
    assert warnings == scanned.cast_warnings(target.torch_dtype)
    assert {name: loaded.changed[name, target.torch_dtype] for name in stored} == expected
    assert expected["model.norm.weight"] == 0 and "model.norm.weight" not in "".join(warnings)
    exact = casts_exactly(file_dtype, target.torch_dtype)
    assert len(warnings) == (0 if exact else 1) and any(expected.values()) == (not exact)


def test_a_value_that_becomes_zero_is_named_and_counted(tmp_path):
    directory = write_checkpoint(tmp_path / "checkpoint", torch.float16)
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: torch.full_like(tensor, 0.5).to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    table = load_file(directory / "role_embedding.safetensors")["weight"]
    save_file({"weight": torch.ones_like(table)}, directory / "role_embedding.safetensors")
    assert open_checkpoint(directory).cast_warnings(torch.float16) == []
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = 1e-9
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    [warning] = open_checkpoint(directory).cast_warnings(torch.float16)
    size = tensors["model.layers.1.mlp.up_proj.weight"].numel()
    assert f"model.layers.1.mlp.up_proj.weight (3 of {size})" in warning and "float16 from BF16, 3 values" in warning
