"""Loading: whole files or shards, any float dtype into any other, nothing partial, in bounded memory."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimodel import load_model
from minimodel.bits import same_bits
from minimodel.checkpoint import open_checkpoint
from minimodel.numerics import DTYPES
from minimodel.packed import why_not_packed
from minimodel.safetensors_file import FILE_DTYPES, count_changed
from tests.conftest import numeric
from tests.helpers import edit_json, edit_tensors, random_tensor, refused
from tests.tiny import split_into_shards, write_checkpoint

IDS, POSITIONS = torch.tensor([[5, 9, 200, 31, 31, 7]]), torch.arange(6)[None]
ROLES = torch.tensor([[0, 0, 1, 4, 5, 5]])


def logits(directory, dtype):
    model = load_model(directory, numeric(dtype), copies=1)
    with torch.inference_mode():
        return model.logits(model(IDS, None if model.role_embedding is None else ROLES, POSITIONS, None))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_give_the_bits_of_the_single_file(tiny_directory, directory, tmp_path, dtype, shards):
    single = logits(tiny_directory, dtype)
    split_into_shards(directory, shards)
    assert same_bits(logits(directory, dtype), single)
    assert not same_bits(logits(write_checkpoint(tmp_path / "other", seed=1), dtype), single)


def test_a_wider_file_in_a_bf16_model_is_rounded_as_if_it_had_been_saved_so(tiny_directory, tmp_path):
    wide = write_checkpoint(tmp_path / "wide", torch.float32)
    assert same_bits(logits(wide, "bf16"), logits(tiny_directory, "bf16"))
    assert not same_bits(logits(wide, "fp32"), logits(tiny_directory, "fp32"))


def test_tied_and_untied_heads(tmp_path):
    """vllm-project/vllm 51665 (case 10): the head in the file is used, whatever the flag says."""
    tied = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    own, embedding = logits(tied, "fp32"), load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tied / "model.safetensors", **{"lm_head.weight": embedding.clone()})
    assert same_bits(logits(tied, "fp32"), own)
    edit_tensors(tied / "model.safetensors", **{"lm_head.weight": random_tensor(288, 128, dtype=torch.bfloat16)})
    with_head = logits(tied, "fp32")
    assert not same_bits(with_head, own)
    edit_json(tied / "config.json", tie_word_embeddings=False)
    assert same_bits(logits(tied, "fp32"), with_head)


def test_the_window_number_alone_does_not_move_a_bit(directory, bf16, tiny_directory):
    """huggingface/transformers 38002 (case 9)."""
    without = logits(tiny_directory, "bf16")
    edit_json(directory / "config.json", sliding_window=4)
    assert same_bits(logits(directory, "bf16"), without)
    edit_json(directory / "config.json", rope_theta=10000.0)
    assert not same_bits(logits(directory, "bf16"), without)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("file", ["model.safetensors", "role_embedding.safetensors"])
def test_a_weight_that_is_not_finite_is_refused_by_name(directory, file, value):
    """Case 17: NaN."""
    name = "weight" if "role" in file else "model.layers.2.mlp.up_proj.weight"
    tensor = load_file(directory / file)[name]
    tensor.view(-1)[77] = value
    edit_tensors(directory / file, **{name: tensor})
    with refused(file, f"tensor {name}", "finite"):
        load_model(directory, numeric("bf16"))


def test_a_value_beyond_fp16_is_refused_not_turned_into_infinity(directory):
    edit_tensors(directory / "model.safetensors", **{"model.norm.weight": torch.full((128,), 1e6).bfloat16()})
    load_model(directory, numeric("bf16"))
    with refused("tensor model.norm.weight", "finite"):
        load_model(directory, numeric("fp16"))


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
    """At most 1.1 times the weights plus 300 MB, in its own process; a plain load_file and `.to` takes more. The check
    of equal copies adds a layer, a head and 100 MB."""
    size = {"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    directory = write_checkpoint(tmp_path / "large", config=size)
    stored = (directory / "model.safetensors").stat().st_size
    assert stored > 200e6

    def peak(*arguments):
        command = [sys.executable, "-c", LOAD, str(directory), *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    plain = peak("load_model", "bf16", "plain", "1")
    assert plain <= 1.1 * stored + 300e6
    wide = peak("load_model", "fp32", "plain", "1")
    assert wide <= 1.1 * 2 * stored + 300e6
    head = 2 * size["vocab_size"] * size["hidden_size"]
    layer = (stored - head) / size["num_hidden_layers"]
    assert peak("load_model", "bf16", "plain", "2") <= plain + head + layer + 100e6
    # packing holds one product's weights twice, its check once more, the head's first; never all of them
    for dtype, unpacked, width in (("bf16", plain, 1), ("fp32", wide, 2)):
        if not why_not_packed(DTYPES[dtype], torch.device("cpu")):
            assert peak("load_model", dtype, "packed", "1") < unpacked + 2 * width * head < unpacked + width * stored
    assert peak("load_file") > 1.1 * 2 * stored + 300e6, "the measurement must see a second copy"


@pytest.mark.parametrize("file_dtype", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_values_that_a_cast_changes_are_counted_by_tensor(tmp_path, file_dtype, dtype):
    """A tensor whose values all survive is not named."""
    directory, target = write_checkpoint(tmp_path / "checkpoint", torch.float32, stock=True), numeric(dtype).torch_dtype
    path = directory / "model.safetensors"
    stored = {name: (tensor.double() * 1.1).to(FILE_DTYPES[file_dtype]) for name, tensor in load_file(path).items()}
    stored["model.norm.weight"].fill_(0.5)
    save_file(stored, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(directory)
    for name, tensor in stored.items():
        values = zip(tensor.flatten().tolist(), tensor.to(target).flatten().tolist())
        expected = sum(before != after for before, after in values)
        assert count_changed(checkpoint.tensors[name], target) == expected
    warnings = "".join(checkpoint.cast_warnings(target))
    exact = torch.promote_types(FILE_DTYPES[file_dtype], target) == target
    assert ("lm_head.weight (" in warnings) == (not exact) and "model.norm.weight" not in warnings
