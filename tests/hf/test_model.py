"""The ladder's upper rungs, bit for bit: a whole small model with roles, a stock one, and the bundled demo."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import minimodel.decoder
from experiments.run.options import DEMO
from minimodel.bits import bits, same_bits
from minimodel.checkpoint import open_checkpoint
from minimodel.load import load_model
from minimodel.numerics import DTYPES
from minimodel.selfcheck import copies_fault
from tests.hf import versions
from tests.hf.conftest import CONSTRUCTIONS, numeric
from tests.hf.inputs import CONTRACT, Request, plain, role_mask, six_blocks
from tests.hf.reference import Reference
from tests.hf.runs import Run, differing, run_ours, run_theirs


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_model_with_roles(construction, our_runs, their_runs):
    assert differing(our_runs[construction], their_runs[construction]) == []


def test_another_attention_kernel_is_seen(directory, dtype, asked, their_runs):
    """Eager differs in layer 1 first: layer 0's keys and values come before any attention. The other releases' kernel
    agrees in one call; token by token it depends on the CPU whether, and where, the two kernels differ."""
    eager, other = (load_model(directory, numeric(dtype, name)) for name in ("eager", versions.other_kernel()))
    assert differing(run_ours(eager, asked, "incremental"), their_runs["incremental"])[0] == "layer 1 key"
    assert differing(run_ours(other, asked, "prefill"), their_runs["prefill"]) == []
    found = differing(run_ours(other, asked, "incremental"), their_runs["incremental"])
    assert not any(name.startswith("layer 0") for name in found)


def test_constructions_differ_on_both_sides(our_runs, their_runs):
    """Prefill and incremental hold other bits; if they did not, the two rungs above would be one."""
    for runs in (our_runs, their_runs):
        held = [[pair for pair in runs[name].tensors if pair[0].startswith("layer")] for name in CONSTRUCTIONS[:2]]
        assert differing(Run(tuple(held[0])), Run(tuple(held[1])))


def test_two_threads(directory, dtype, ours, theirs, asked):
    contract = numeric(dtype, threads=2)
    contract.apply()
    if fault := copies_fault(contract, ours.config):
        pytest.skip(f"two equal copies differ with two threads: {fault}")
    model = load_model(directory, contract)
    assert differing(run_ours(model, asked, "chunks"), run_theirs(theirs, asked, "chunks")) == []


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_stock_model(construction, stock, dtype):
    """Plain Qwen2.5: no roles, no mask, and transformers makes its own position ids."""
    model, reference = load_model(stock, numeric(dtype)), Reference(stock, DTYPES[dtype])
    asked = plain(model.config.vocab_size)
    assert differing(run_ours(model, asked, construction), run_theirs(reference, asked, construction)) == []
    other = Request(asked.input_ids.roll(1, dims=1), None, asked.position_ids, None)
    assert differing(run_ours(model, other, construction), run_theirs(reference, asked, construction)) != []


def test_whole_causal_model_call(stock, dtype):
    """Qwen2ForCausalLM called as users call it (input ids, last logits only) gives our logits."""
    model, reference = load_model(stock, numeric(dtype)), Reference(stock, DTYPES[dtype])
    asked = plain(model.config.vocab_size)
    last = versions.last_logits_argument(type(reference.model).forward)
    with torch.inference_mode():
        expected = reference.model(input_ids=asked.input_ids, use_cache=True, **{last: 1}).logits
        assert same_bits(model.logits(model(*asked.call(0, asked.length))[:, -1:]), expected)


def with_config(path: Path, change: dict) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **change}))


def with_contract(path: Path, change: dict) -> None:
    (path / "contract.json").write_text(json.dumps({**CONTRACT, **change}))


def one_entry(query: int, key: int) -> list[list[int]]:
    table = [list(row) for row in minimodel.decoder.RoleRules().visibility]
    table[query][key] ^= 1
    return table


def flip_one_bit(path: Path) -> None:
    """The lowest bit of one value bias: less than a 128th of one number of 200,000."""
    tensors = load_file(path / "model.safetensors")
    bits(tensors["model.layers.1.self_attn.v_proj.bias"])[7] ^= 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


FAULTS = {
    # what is done to our copy of the checkpoint, and the first tensor in forward order that must show it
    "rope_base": (lambda path: with_config(path, {"rope_theta": 10_000.0}), "layer 0 key"),
    "role_row_off_by_one": (lambda path: with_contract(path, {"role_offset": 7}), "layer 0 key"),
    "one_bit": (flip_one_bit, "layer 1 value"),
    "norm_eps": (lambda path: with_config(path, {"rms_norm_eps": 1e-2}), "layer 0 key"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_one_wrong_thing_is_seen(fault, directory, dtype, asked, their_runs, tmp_path):
    break_it, first = FAULTS[fault]
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    break_it(copy)
    found = differing(run_ours(load_model(copy, numeric(dtype)), asked, "prefill"), their_runs["prefill"])
    assert found and found[0] == first


def test_visibility_entry_is_seen(ours, asked, their_runs):
    """Branch 3 sees branch 1: nothing before the attention of layer 0 moves, and everything after it."""
    assert asked.roles is not None
    wrong = replace(asked, mask=role_mask(asked.roles, tuple(tuple(row) for row in one_entry(3, 1))))
    found = differing(run_ours(ours, wrong, "prefill"), their_runs["prefill"])
    assert found[0] == "layer 1 key"


def test_shifted_position_is_seen(ours, asked, their_runs):
    shifted = asked.position_ids.clone()
    shifted[:, 40:] -= 1
    found = differing(run_ours(ours, replace(asked, position_ids=shifted), "prefill"), their_runs["prefill"])
    assert found[0] == "layer 0 key"


def test_norm_order_is_seen(ours, asked, their_runs, monkeypatch, dtype):
    """The weight product before the cast back: other bits in BF16, and no other ones in FP32, where no cast is."""

    def early(hidden_states, weight, eps):
        wide = hidden_states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * (wide * scale)).to(hidden_states.dtype)

    monkeypatch.setattr(minimodel.decoder, "rms_norm", early)
    found = differing(run_ours(ours, asked, "prefill"), their_runs["prefill"])
    assert found[0] == "layer 0 key" if dtype == "bf16" else found == []


needs_demo = pytest.mark.skipif(
    not (DEMO / "primary" / "model.safetensors").exists(), reason="the demo checkpoint has not been trained yet"
)


@needs_demo
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_demo(construction, dtype):
    """The bundled checkpoint (BF16 weights, tied head) in both precisions, over blocks of the demo's lengths."""
    primary = DEMO / "primary"
    contract = numeric(dtype)
    contract.apply()
    if fault := copies_fault(contract, open_checkpoint(primary).config):
        pytest.skip(f"two equal copies differ: {fault}")
    model, reference = load_model(primary, contract), Reference(primary, DTYPES[dtype])
    asked = six_blocks(primary, content=(60, 30, 25, 28, 30, 8))
    expected = run_theirs(reference, asked, construction)
    assert differing(run_ours(model, asked, construction), expected) == []
    if construction == "incremental":
        other = load_model(primary, numeric(dtype, "eager"))
        assert differing(run_ours(other, asked, construction), expected) != []
