"""batch_control on a tiny checkpoint: whole generations by copies, log-probabilities, gates."""

import math
from types import SimpleNamespace

import pytest
import torch

import experiments.run.control as control
from cache.build import build_live
from decode import RowFailure
from decode.greedy import alone, greedy_suffix
from tests.experiments.runs import ROWS, open_finished
from tests.helpers import flip_bit


@pytest.fixture(scope="module")
def finished(every_run):
    out, printed = every_run["batch_control"], every_run.printed["batch_control"]
    assert "one copy against two: tokens differ" in printed and f"{ROWS} of 10 rows" in printed
    return out


def test_rows_hold_three_generations_and_two_comparisons(finished):
    manifest, rows, summary = open_finished(finished)
    for row in rows:
        assert {name: arm["copies"] for name, arm in row["arms"].items()} == control.ARMS
        assert set(row["comparisons"]) == {"pair:pair_replica", "singleton:pair"}
        assert row["comparisons"]["pair:pair_replica"]["logprobs"]["exact"]
        for arm in row["arms"].values():
            free = [p for p, margin in zip(arm["logprobs"], arm["margins"]) if margin is not None]
            assert free and all(p <= 0 for p in free)
            assert [p is None for p in arm["logprobs"]] == [m is None for m in arm["margins"]]
    differ = sum(not row["comparisons"]["singleton:pair"]["logprobs"]["exact"] for row in rows)
    assert summary["logprob_disagreement"]["count"] == differ and summary["logprob_disagreement"]["n"] == ROWS
    lengths = [entry["length"] for entry in manifest["panel"]["rows"]]
    assert lengths == sorted(lengths) and summary["input_length"] == {"min": lengths[0], "max": lengths[-1]}


def test_tokens_and_log_probabilities_are_counted_each(finished):
    manifest, rows, _ = open_finished(finished)
    for row, token, logprob in zip(rows, (None, None, 5, None), (None, 3, 4, 0), strict=True):
        pair = row["comparisons"]["singleton:pair"]
        pair["tokens"].update(exact=token is None, first_divergence=token)
        pair["logprobs"].update(exact=logprob is None, first_divergence=logprob)
    decoder = SimpleNamespace(numeric=SimpleNamespace(dtype="bf16"))
    summary = control.Control("batch_control", decoder, [], manifest["panel"], 0).summarise(rows)
    counts = summary["token_disagreement"]["count"], summary["logprob_disagreement"]["count"]
    first = summary["first_token_divergence"]["min"], summary["first_logprob_divergence"]["min"]
    assert (counts, first) == ((1, 3), (5, 0))


def test_a_pair_is_the_experiments_decoding(bf16, prompt):
    """A whole generation gives the tokens of a live boundary and its suffix."""
    made = alone(control.whole_steps(bf16, prompt, 2))
    live = build_live(bf16, prompt)
    suffix = greedy_suffix(bf16, live)
    assert made.tokens == live.state.tokens[len(prompt) :] + suffix.tokens
    assert made.margins == live.margins + suffix.margins and made.chosen_by_logits


def test_copies_whose_caches_differ_at_the_end_fail_the_row(bf16, prompt, monkeypatch):
    real = control.generate

    def spoiled(stepper, *given):
        out = yield from real(stepper, *given)
        flip_bit(stepper.cache.values(2), (1, 0, 4, 0))
        return out

    monkeypatch.setattr(control, "generate", spoiled)
    with pytest.raises(RowFailure, match="cache layer 2 value: the physical copies differ"):
        alone(control.whole_steps(bf16, prompt, 2))


def test_a_logprob_is_the_float64_log_softmax_of_the_model_dtypes_logits():
    logits = torch.tensor([[1.5, -2.0, 0.25, 3.0]], dtype=torch.bfloat16)
    total = math.log(sum(math.exp(x) for x in (1.5, -2.0, 0.25, 3.0)))
    assert control.selected_logprob(logits, 2) == pytest.approx(0.25 - total, rel=1e-14)


def test_comparisons_worked_out_by_hand():
    def compared(left, right):
        made = (control.Generation(t, (None,) * len(t), p, "", True, True) for t, p in (left, right))
        found = control.comparison_entry(*made)
        tokens, logprobs = found["tokens"], found["logprobs"]
        assert tokens["exact"] == (tokens["first_divergence"] is None)
        assert logprobs["exact"] == (logprobs["first_divergence"] is None)
        places = tokens["first_divergence"], logprobs["first_divergence"]
        return places, (logprobs["max_abs_aligned"], logprobs["max_abs_shared"])

    left = (1, 2, 3, 4), (-0.5, None, -1.0, -2.0)
    assert compared(left, left) == ((None, None), (0.0, 0.0))
    nudged = (1, 2, 3, 4), (-0.5, None, math.nextafter(-1.0, 0), -2.0)
    assert compared(left, nudged) == ((None, 2), (2**-53, 2**-53))
    assert compared(left, ((1, 2, 9), (-0.5, None, -1.25))) == ((2, 2), (0.25, 0.0))
    # the sign of zero is a bit like any other
    assert compared(((1,), (0.0,)), ((1,), (-0.0,))) == ((None, 0), (0.0, 0.0))
