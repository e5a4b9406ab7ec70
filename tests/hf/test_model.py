"""The ladder, bit for bit: RoPE table, every step of every layer, a small model, a stock one, the demo."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode.greedy import alone
from experiments.run.control import chat_steps, selected_logprob
from experiments.run.options import DEMO
from minimodel.bits import same_bits
from minimodel.checkpoint import open_checkpoint
from minimodel.layers import rotary_table
from minimodel.load import load_model
from minimodel.numerics import DTYPES
from minimodel.roles import VISIBILITY
from minimodel.selfcheck import copies_fault
from tests.helpers import edit_json, edit_tensors, flip_bit
from tests.hf import versions
from tests.hf.conftest import CONSTRUCTIONS, numeric
from tests.hf.reference import Reference
from tests.hf.runs import Request, differing, plain, role_mask, run_ours, run_theirs, six_blocks

POSITIONS = 40_000  # beyond Qwen2.5's 32,768


@torch.inference_mode()
def test_rope_table(ours, theirs):
    dtype, config = theirs.dtype, ours.config
    positions = torch.arange(POSITIONS)[None]
    cos, sin = theirs.model.model.rotary_emb(torch.empty(0, dtype=dtype), positions)
    mine = rotary_table(POSITIONS, config.head_dim, config.rope_theta, dtype)
    assert same_bits(mine[0], cos[0]) and same_bits(mine[1], sin[0])
    # controls: another base, positions one off, angles computed in the model dtype
    base = rotary_table(POSITIONS, config.head_dim, 10_000.0, dtype)
    assert not same_bits(base[0], cos[0]) and not same_bits(base[1], sin[0])
    assert not same_bits(mine[0][1:], cos[0, :-1])
    narrow = positions[0].to(torch.bfloat16).float()[:, None] * theirs.model.model.rotary_emb.inv_freq.float()
    assert not same_bits(torch.cat((narrow, narrow), dim=-1).cos().to(dtype), cos[0])


@pytest.mark.parametrize("construction", ["prefill", "incremental"])
def test_every_step(construction, directory, dtype, ours, theirs, fed):
    """Embedding, norms, projections, rotation, attention, residuals and MLP of every layer, in forward order."""

    def steps(run, model):
        seen = []
        run(model, fed, construction, lambda name, tensor: seen.append((name, tensor.clone())))
        return seen

    def unequal(left, right):
        assert [name for name, _ in left] == [name for name, _ in right] and len(left) > 30
        return [name for (name, a), (_, b) in zip(left, right) if not same_bits(a, b)]

    eager = load_model(directory, numeric(dtype, "eager"))  # the control: it rounds after each of its steps
    expected = steps(run_theirs, theirs)
    assert unequal(steps(run_ours, ours), expected) == []
    assert unequal(steps(run_ours, eager), expected)[0] == "layers.0.self_attn.attention"


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_model_with_roles(construction, our_runs, their_runs):
    assert differing(our_runs[construction], their_runs[construction]) == []


def test_another_attention_kernel_is_seen(directory, dtype, fed, their_runs):
    """Eager differs in layer 1 first: layer 0's keys and values come before any attention. The other releases' kernel
    agrees in one call; token by token it depends on the CPU whether, and where, the two kernels differ."""
    eager, other = (load_model(directory, numeric(dtype, name)) for name in ("eager", versions.other_kernel()))
    assert differing(run_ours(eager, fed, "incremental"), their_runs["incremental"])[0] == "layer 1 key"
    assert differing(run_ours(other, fed, "prefill"), their_runs["prefill"]) == []
    found = differing(run_ours(other, fed, "incremental"), their_runs["incremental"])
    assert not any(name.startswith("layer 0") for name in found)


def test_constructions_differ_on_both_sides(our_runs, their_runs):
    """Prefill and incremental hold other bits; if they did not, the two rungs above would be one."""
    for runs in (our_runs, their_runs):
        prefill, incremental = runs["prefill"], runs["incremental"]
        assert any(not same_bits(prefill[name], incremental[name]) for name in prefill if name.startswith("layer"))


def test_two_threads(directory, dtype, ours, theirs, fed):
    contract = numeric(dtype, threads=2)
    contract.apply()
    if fault := copies_fault(contract, ours.config):
        pytest.skip(f"two equal copies differ with two threads: {fault}")
    model = load_model(directory, contract)
    assert differing(run_ours(model, fed, "chunks"), run_theirs(theirs, fed, "chunks")) == []


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_stock_model(construction, stock):
    """Plain Qwen2.5: no roles, no mask, and transformers makes its own position ids."""
    model, reference = stock
    model.numeric.apply()
    fed = plain(model.config.vocab_size)
    assert differing(run_ours(model, fed, construction), run_theirs(reference, fed, construction)) == []
    other = Request(fed.input_ids.roll(1, dims=1), None, fed.position_ids, None)
    assert differing(run_ours(model, other, construction), run_theirs(reference, fed, construction)) != []


def test_whole_causal_model_call(stock):
    """Qwen2ForCausalLM called as users call it (input ids, last logits only) gives our logits."""
    model, reference = stock
    model.numeric.apply()
    fed = plain(model.config.vocab_size)
    last = versions.argument(type(reference.model).forward, versions.LAST_LOGITS)
    with torch.inference_mode():
        expected = reference.model(input_ids=fed.input_ids, use_cache=True, **{last: 1}).logits
        assert same_bits(model.logits(model(*fed.call(0, fed.length))[:, -1:]), expected)


def one_bit_of(path):
    """Flips the lowest bit of one value bias: less than a 128th of one number of 200,000."""
    name = "model.layers.1.self_attn.v_proj.bias"
    bias = load_file(path)[name]
    flip_bit(bias, (7,))
    edit_tensors(path, **{name: bias})


# what is done to our copy of the checkpoint, and the first tensor in forward order that must show it
FAULTS = {
    "rope_base": (lambda path: edit_json(path / "config.json", rope_theta=10_000.0), "layer 0 key"),
    "role_row_off_by_one": (lambda path: edit_json(path / "contract.json", role_offset=7), "layer 0 key"),
    "norm_eps": (lambda path: edit_json(path / "config.json", rms_norm_eps=1e-2), "layer 0 key"),
    "one_bit": (lambda path: one_bit_of(path / "model.safetensors"), "layer 1 value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_thing_is_seen(fault, directory, dtype, fed, their_runs, tmp_path):
    break_it, first = FAULTS[fault]
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    break_it(copy)
    found = differing(run_ours(load_model(copy, numeric(dtype)), fed, "prefill"), their_runs["prefill"])
    assert found and found[0] == first


def test_a_visibility_entry_and_a_shifted_position_are_seen(ours, fed, their_runs):
    """Where branch 3 sees branch 1, nothing before the attention of layer 0 moves, and everything after it."""
    table, shifted = [list(row) for row in VISIBILITY], fed.position_ids.clone()
    table[3][1] ^= 1
    shifted[:, 40:] -= 1
    for change, first in (
        ({"mask": role_mask(fed.roles, tuple(map(tuple, table)))}, "layer 1 key"),
        ({"position_ids": shifted}, "layer 0 key"),
    ):
        assert differing(run_ours(ours, replace(fed, **change), "prefill"), their_runs["prefill"])[0] == first


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
    fed = six_blocks(primary, content=(60, 30, 25, 28, 30, 8))
    expected = run_theirs(reference, fed, construction)
    assert differing(run_ours(model, fed, construction), expected) == []
    if construction == "incremental":
        other = load_model(primary, numeric(dtype, "eager"))
        assert differing(run_ours(other, fed, construction), expected) != []


PROMPT = [269, 10, 11, 12, 30, 31, 270, 269, 13]
NEW = 24


@pytest.mark.parametrize("copies", [1, 2])
def test_tokens_and_log_probabilities_are_those_of_generate(stock_directory, dtype, copies):
    """The stock control against transformers' own `generate`: tokens, logits at every choice, and its end."""
    model = load_model(stock_directory, numeric(dtype))
    reference = Reference(stock_directory, DTYPES[dtype])
    given = torch.tensor([PROMPT] * copies)

    def theirs(stop):
        out = reference.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=stop,
            pad_token_id=256,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(PROMPT) :].tolist()
        # widened to FP32 by transformers, which changes no value
        rows = [logits.to(DTYPES[dtype]) for logits in out.logits]
        return tokens, [selected_logprob(logits, token) for logits, token in zip(rows, tokens)]

    free = alone(chat_steps(model, PROMPT, copies, (), NEW))
    assert theirs([287]) == (list(free.tokens), list(free.logprobs)) and len(free.tokens) == NEW
    end = next(token for i, token in enumerate(free.tokens) if i > 4 and token not in free.tokens[:i])
    stopped = alone(chat_steps(model, PROMPT, copies, (end,), NEW))
    assert theirs([end]) == (list(stopped.tokens), list(stopped.logprobs)) and stopped.tokens[-1] == end
