"""The greedy choice and what it generates: ties, eligibility, margins, copies that must agree, forced tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cache import KVCache, build_live, build_prefill
from decode import Contract, RowFailure, State, greedy_suffix
from decode.greedy import choose
from decode.stepper import Stepper
from minimodel import load_model
from tests.conftest import numeric
from tests.helpers import DTYPES, edit_tensors, flip_bit, random_tensor, refused
from tests.tiny import TASK, write_checkpoint


def copies(row):
    return row[None].repeat(2, 1)


def exact_choice(row, allowed):
    """Token and margin from one row of logits, in numpy."""
    values = np.where(allowed, row.double().numpy(), -np.inf)
    second, first = np.sort(values)[-2:]
    return int(values.argmax()), float(first - second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "threads"), [(12, 1), (288, 2), (32769, 2), (151936, 1), (151936, 2)])
def test_ties_go_to_the_lowest_id(dtype, vocab_size, threads):
    """pytorch/pytorch 22853, 41998 (case 3): the same top logit at ids 5, 9 and last."""
    numeric("bf16", threads=threads).apply()
    row = random_tensor(vocab_size, dtype=dtype).clamp(max=4)
    row[[5, 9, vocab_size - 1]] = 7.5
    everything = torch.ones(vocab_size, dtype=torch.bool)
    assert choose(copies(row), everything) == (5, 0.0)
    everything[5] = False
    assert choose(copies(row), everything) == (9, 0.0)
    row[vocab_size - 1] = 7.75
    assert choose(copies(row), everything) == (vocab_size - 1, 0.25), "the control: no tie"
    zeros = torch.tensor([-1.0, -0.0, 0.0], dtype=dtype)
    assert choose(copies(zeros), torch.ones(3, dtype=torch.bool)) == (1, 0.0), "zeros of two signs are a tie"


def test_the_padded_vocabulary_is_never_chosen():
    """QwenLM/Qwen3 1247 (case 14): eligibility applies before the tie rule."""
    row = random_tensor(151936, dtype=torch.bfloat16).clamp(max=3)
    row[151700], row[[40, 80]] = 9.0, 5.0
    eligible = torch.arange(151936) < 151665
    assert choose(copies(row), eligible) == (40, 0.0)
    assert choose(copies(row), torch.ones_like(eligible))[0] == 151700
    row[[151664, 151700]] = 9.0
    assert choose(copies(row), eligible)[0] == 151664


@pytest.fixture
def watched(monkeypatch):
    """Makes a model keep the first copy's last row of logits of every call; returns the list of rows."""

    def watch(model):
        rows, own = [], model.logits

        def logits(hidden, observe=None):
            out = own(hidden)
            rows.append(out[0, -1].clone())
            return out

        monkeypatch.setattr(model, "logits", logits)
        return rows

    return watch


def test_a_model_whose_padded_rows_are_the_best_never_says_them(tmp_path, watched):
    """The same report (case 14)."""
    directory = write_checkpoint(tmp_path / "padded")
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    padded = range(269, 287)  # pairs of opposite rows in nine directions: no hidden state is orthogonal to all of them
    head[padded[::2]] *= 100
    head[padded[1::2]] = -head[padded[::2]]
    edit_tensors(directory / "model.safetensors", **{"lm_head.weight": head})
    model, contract = load_model(directory, numeric("bf16")), Contract.load(directory)
    rows = watched(model)
    live = build_live(model, State.prompt(contract, TASK["question"], TASK["choices"]))
    suffix = greedy_suffix(model, live)
    assert {int(row.argmax()) for row in rows} <= set(padded), "the control: they are the best at every step"
    assert max(live.state.tokens + suffix.tokens) < 269


@pytest.mark.parametrize("dtype", DTYPES)
def test_margin_is_the_exact_difference_of_the_two_best(dtype):
    for seed in range(20):
        row, eligible = random_tensor(300, dtype=dtype, seed=seed), random_tensor(300, seed=seed + 100) > 0
        assert choose(copies(row), eligible) == exact_choice(row, eligible.numpy())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_that_are_not_finite_fail_the_row(value, dtype):
    """Also where no eligible token stands: pytorch/pytorch 137337 (case 17)."""
    row, eligible = random_tensor(300, dtype=dtype), torch.arange(300) < 200
    choose(copies(row), eligible)
    for place in (0, 299):
        bad = row.clone()
        bad[place] = value
        with pytest.raises(RowFailure, match="finite"):
            choose(copies(bad), eligible)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_differ_in_one_bit_fail_the_row(dtype):
    eligible = torch.ones(300, dtype=torch.bool)
    for count, copy in ((2, 1), (2, 0), (3, 2), (3, 1)):
        logits = random_tensor(300, dtype=dtype)[None].repeat(count, 1)
        choose(logits, eligible)
        flip_bit(logits, (copy, 123))
        with pytest.raises(RowFailure, match="logits: the physical copies differ"):
            choose(logits, eligible)
    minus = torch.zeros(2, 300, dtype=dtype)
    minus[1] = -minus[1]
    with pytest.raises(RowFailure):
        choose(minus, eligible)
    assert choose(random_tensor(1, 300, dtype=dtype), eligible)[0] >= 0, "one copy has nothing to agree with"


def test_a_choice_without_anything_eligible_is_refused():
    row = random_tensor(300)
    assert choose(copies(row), torch.arange(300) == 7)[0] == 7, "the control: one id is enough"
    with refused("eligible", "at least one id", "none"):
        choose(copies(row), torch.zeros(300, dtype=torch.bool))
    for wrong in (torch.ones(299, dtype=torch.bool), torch.ones(300, dtype=torch.uint8)):
        with refused("eligible: expected torch.bool [300]"):
            choose(copies(row), wrong)


@pytest.mark.parametrize(("at", "place"), [(4, "block branch_1, step 4"), (30, "block")])
def test_a_failing_logit_names_its_block_and_step(bf16, prompt, at, place, monkeypatch):
    own, calls = bf16.logits, iter(range(1, 1000))
    nan_at = lambda call: float("nan") if call == at else 1.0  # noqa: E731
    monkeypatch.setattr(bf16, "logits", lambda hidden, observe=None: own(hidden) * nan_at(next(calls)))
    with pytest.raises(RowFailure, match=rf"{place}.*, slot \d+: logits: expected finite values, found NaN"):
        build_live(bf16, prompt)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forced_tokens_take_no_logits_and_margins_are_those_of_the_logits(
    tiny_directory, contract, prompt, dtype, watched
):
    model = load_model(tiny_directory, numeric(dtype))
    rows = watched(model)

    def exact(rows, roles):
        return [exact_choice(row, contract.eligible[role].numpy()) for row, role in zip(rows, roles)]

    live = build_live(model, prompt)
    generated = list(zip(live.state.tokens[len(prompt) :], live.state.roles[len(prompt) :], live.margins))
    free = [(token, role, margin) for token, role, margin in generated if margin is not None]
    assert len(rows) == len(free) + 1, "one row per choice, and the boundary's own"
    assert [(token, margin) for token, _, margin in free] == exact(rows, [role for _, role, _ in free])
    for (token, role, margin), before in zip(generated[1:], generated):
        content = sum(r == role and contract.is_ordinary(t) for t, r, _ in generated)
        at_cap = token == contract.close_ids[role] and content == contract.caps[role]
        assert (margin is None) == (token in contract.open_ids or before[0] in contract.close_ids or at_cap)

    rows.clear()
    suffix = greedy_suffix(model, live)
    end = suffix.tokens.index(contract.close_ids[4])
    chosen = enumerate(zip(suffix.tokens, suffix.margins))
    choices = [(i, token, margin) for i, (token, margin) in chosen if margin is not None]
    assert len(rows) == len(choices) - 1, "the first choice reads the boundary's logits"
    roles = [4 if i <= end else 5 for i, _, _ in choices]
    assert [choice[1:] for choice in choices] == exact([live.logits[0], *rows], roles)


def test_a_suffix_is_the_rest_of_the_contract_and_the_same_again(three, contract):
    suffix = greedy_suffix(three.model, three.live)
    whole = State.from_tokens(contract, three.live.state.tokens + suffix.tokens)
    assert whole.structure.done and len(suffix.margins) == len(suffix.tokens)
    between = contract.close_ids[4], contract.open_ids[5]
    assert suffix.tokens == (*suffix.merge, *between, *suffix.answer, contract.close_ids[5])
    assert len(suffix.merge) <= 12 and len(suffix.answer) <= 6
    json.dumps(suffix.margins, allow_nan=False)
    assert greedy_suffix(three.model, three.live) == suffix


@pytest.mark.parametrize("where", ["logits", 0, 2])
def test_boundary_copies_that_differ_in_one_bit_fail_the_row(three, where):
    cache, logits = three.live.cache.copy(), three.live.logits.clone()
    boundary = replace(three.live, cache=cache, logits=logits)
    greedy_suffix(three.model, boundary)
    flip_bit(*((logits, (1, 280)) if where == "logits" else (cache.values(where), (1, 0, 3, 5))))
    with pytest.raises(RowFailure, match="copies differ"):
        greedy_suffix(three.model, boundary)


def test_another_checkpoints_role_rules_are_refused(three, tmp_path):
    other = Contract.load(write_checkpoint(tmp_path / "other", contract={"visibility": [[1] * 6] * 6}))
    state = State.from_tokens(other, three.live.state.tokens)
    with refused("role rules"):
        greedy_suffix(three.model, replace(three.live, state=state))
    with refused("role rules"):
        build_prefill(three.model, state)


def test_a_context_beyond_the_models_limit_is_refused(tmp_path, bf16):
    directory = write_checkpoint(tmp_path / "short", config={"max_position_embeddings": 60})
    model, contract = load_model(directory, numeric("bf16")), Contract.load(directory)
    prompt = State.prompt(contract, TASK["question"], TASK["choices"])
    with refused("max_position_embeddings", "60"):
        build_live(model, prompt)
    branches = [token for i in (1, 2, 3) for token in (contract.open_ids[i], 7, contract.close_ids[i])]
    state = State.from_tokens(contract, [*prompt.tokens, *branches, contract.open_ids[4]])
    with refused(f"context: expected at most max_position_embeddings 60 tokens, found {len(state)}"):
        build_prefill(model, state)
    with refused("max_position_embeddings", "1024", "1025"):
        Stepper(bf16, KVCache.for_model(bf16, 2, 4), 2, 1025)
