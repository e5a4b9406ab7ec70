"""The greedy choice: ties, eligibility, margins, and copies that must agree."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import build_live
from decode import Contract, RowFailure, State, greedy_suffix
from decode.greedy import choose
from minimodel import load_model
from tests.conftest import numeric
from tests.helpers import flip_bit, random_tensor, refused
from tests.tiny import TASK, write_checkpoint

NARROW = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def copies(row: torch.Tensor) -> torch.Tensor:
    return row[None].repeat(2, 1)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("vocab_size", [12, 64, 288, 32769, 151936])
@pytest.mark.parametrize("threads", [1, 2])
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


def test_zeros_of_two_signs_are_a_tie():
    row = torch.tensor([-1.0, -0.0, 0.0])
    assert choose(copies(row), torch.ones(3, dtype=torch.bool)) == (1, 0.0)


def test_the_padded_vocabulary_is_never_chosen():
    """QwenLM/Qwen3 1247 (case 14): eligibility applies before the tie rule."""
    row = random_tensor(151936, dtype=torch.bfloat16).clamp(max=3)
    row[151700], row[[40, 80]] = 9.0, 5.0
    eligible = torch.arange(151936) < 151665
    assert choose(copies(row), eligible) == (40, 0.0)
    assert choose(copies(row), torch.ones_like(eligible))[0] == 151700
    row[[151664, 151700]] = 9.0
    assert choose(copies(row), eligible)[0] == 151664


def test_a_model_whose_padded_rows_are_the_best_never_says_them(tmp_path):
    """The same report (case 14)."""
    directory = write_checkpoint(tmp_path / "padded")
    tensors = load_file(directory / "model.safetensors")
    padded = range(269, 287)  # pairs of opposite rows in nine directions: no hidden state is orthogonal to all of them
    for row in padded[::2]:
        tensors["lm_head.weight"][row] = 100 * tensors["lm_head.weight"][row]
        tensors["lm_head.weight"][row + 1] = -tensors["lm_head.weight"][row]
    save_file(tensors, directory / "model.safetensors")
    model, contract = load_model(directory, numeric("bf16")), Contract.load(directory)
    best = []
    own = model.logits

    def logits(hidden, observe=None):
        out = own(hidden)
        best.append(int(out[0, -1].argmax()))
        return out

    model.logits = logits
    live = build_live(model, State.prompt(contract, TASK["question"], TASK["choices"]))
    suffix = greedy_suffix(model, live)
    assert set(best) <= set(padded), "the control: the padded rows are the best at every step"
    assert max(live.state.tokens + suffix.tokens) < 269


@pytest.mark.parametrize("dtype", NARROW)
def test_margin_is_the_exact_difference_of_the_two_best(dtype):
    for seed in range(20):
        row, eligible = random_tensor(300, dtype=dtype, seed=seed), random_tensor(300, seed=seed + 100) > 0
        values = np.where(eligible.numpy(), row.double().numpy(), -np.inf)
        second, first = np.sort(values)[-2:]
        token, margin = choose(copies(row), eligible)
        assert token == int(values.argmax()) and margin == first - second and eligible[token]


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
    only = torch.arange(300) == 7
    assert choose(copies(row), only)[0] == 7, "the control: one id is enough"
    with refused("eligible", "at least one id", "none"):
        choose(copies(row), torch.zeros(300, dtype=torch.bool))
    for wrong in (torch.ones(299, dtype=torch.bool), torch.ones(300, dtype=torch.uint8)):
        with refused("eligible: expected torch.bool [300]"):
            choose(copies(row), wrong)


@pytest.mark.parametrize(("at", "place"), [(4, "block branch_1, step 4"), (30, "block")])
def test_a_failing_logit_names_its_block_and_step(bf16, prompt, at, place):
    own, calls = bf16.logits, iter(range(1, 1000))

    def poisoned(hidden, observe=None):
        out = own(hidden)
        return out * float("nan") if next(calls) == at else out

    bf16.logits = poisoned
    try:
        with pytest.raises(RowFailure, match=rf"{place}.*, slot \d+: logits: expected finite values, found NaN"):
            build_live(bf16, prompt)
    finally:
        del bf16.logits
    build_live(bf16, prompt)
