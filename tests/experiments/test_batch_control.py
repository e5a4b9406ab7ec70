"""batch_control on a tiny checkpoint: whole generations by copies, log-probabilities, gates, resumption."""

import json
import math

import pytest
import torch

import experiments.batch_control as batch_control
import experiments.run.control as control
import experiments.run.control as whole
from cache.build import build_live
from decode.greedy import alone, greedy_suffix
from stats.panels import length_spread
from tests.experiments.runs import ROWS, ledger, open_finished, run

BF16 = ("--dtype", "bf16")


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("control") / "run"
    done = run(study, "batch_control", out, *BF16)
    assert "one copy against two: tokens differ" in done.stdout and f"{ROWS} of 10 rows" in done.stdout
    return out


def test_rows_hold_three_generations_and_two_comparisons(finished):
    manifest, rows, summary = open_finished(finished)
    assert [row["row"] for row in rows] == manifest["row_order"]
    for row in rows:
        assert {name: arm["copies"] for name, arm in row["arms"].items()} == control.ARMS
        assert set(row["comparisons"]) == {"pair:pair_replica", "singleton:pair"}
        assert list(row["gates"]) == control.Control.gates() and row["passed"]
        assert row["comparisons"]["pair:pair_replica"]["logprobs"]["exact"]
        for arm in row["arms"].values():
            free = [p for p, margin in zip(arm["logprobs"], arm["margins"]) if margin is not None]
            assert free and all(p <= 0 for p in free)
            assert [p is None for p in arm["logprobs"]] == [m is None for m in arm["margins"]]
    differ = sum(not row["comparisons"]["singleton:pair"]["logprobs"]["exact"] for row in rows)
    assert summary["logprob_disagreement"]["count"] == differ and summary["logprob_disagreement"]["n"] == ROWS
    lengths = [entry["length"] for entry in manifest["panel"]["rows"]]
    assert lengths == sorted(lengths) and summary["input_length"] == {"min": lengths[0], "max": lengths[-1]}


def test_a_pair_is_the_experiments_own_decoding(bf16, prompt):
    """A whole generation gives the tokens of a live boundary and its suffix."""
    made = alone(whole.whole_steps(bf16, prompt, 2))
    live = build_live(bf16, prompt)
    suffix = greedy_suffix(bf16, live)
    assert made.tokens == live.state.tokens[len(prompt) :] + suffix.tokens
    assert made.margins == live.margins + suffix.margins and made.chosen_by_logits


def test_a_logprob_is_the_float64_log_softmax_of_the_model_dtypes_logits():
    logits = torch.tensor([[1.5, -2.0, 0.25, 3.0]], dtype=torch.bfloat16)
    total = math.log(sum(math.exp(x) for x in (1.5, -2.0, 0.25, 3.0)))
    assert whole.selected_logprob(logits, 2) == pytest.approx(0.25 - total, rel=1e-14)


def made(tokens: tuple[int, ...], logprobs: tuple[float | None, ...]) -> whole.Generation:
    return whole.Generation(tokens, tuple(None for _ in tokens), logprobs, "", True, True)


def test_comparisons_worked_out_by_hand():
    left = made((1, 2, 3, 4), (-0.5, None, -1.0, -2.0))
    same = control.comparison_entry(left, left)
    assert same["tokens"]["exact"] and same["logprobs"]["exact"] and same["logprobs"]["max_abs_aligned"] == 0.0
    nudged = made((1, 2, 3, 4), (-0.5, None, math.nextafter(-1.0, 0), -2.0))
    found = control.comparison_entry(left, nudged)
    assert found["tokens"]["exact"] and found["logprobs"]["first_divergence"] == 2
    other = made((1, 2, 9), (-0.5, None, -1.25))
    found = control.comparison_entry(left, other)
    assert found["tokens"] == {"exact": False, "first_divergence": 2}
    assert found["logprobs"]["max_abs_aligned"] == 0.25 and found["logprobs"]["max_abs_shared"] == 0.0
    # the sign of zero is a bit like any other
    zero = control.comparison_entry(made((1,), (0.0,)), made((1,), (-0.0,)))
    assert not zero["logprobs"]["exact"] and zero["logprobs"]["max_abs_aligned"] == 0.0


def test_the_panel_is_a_length_spread_of_the_prompts(study, tmp_path):
    run(study, "batch_control", tmp_path / "run", *BF16, "--limit", 2)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    whole_order = [json.loads(line)["id"] for line in (study / "tasks.jsonl").read_text().splitlines()]
    assert manifest["panel"]["available"] == {"rows": ROWS} and len(manifest["row_order"]) == 2
    lengths = [(entry["length"], entry["row"]) for entry in manifest["panel"]["rows"]]
    assert lengths == sorted(lengths) and set(manifest["row_order"]) <= set(whole_order)
    assert length_spread(lengths, 2) == [0, 1]


def test_a_pair_that_is_not_its_replica_fails_its_gate(study, tmp_path, monkeypatch):
    real, calls = batch_control.whole_steps, []

    def drifting(model, prompt, copies):
        found = yield from real(model, prompt, copies)
        calls.append(copies)
        if len(calls) == 3:
            last = math.nextafter(found.logprobs[1], 0)
            return whole.Generation(
                found.tokens,
                found.margins,
                (found.logprobs[0], last, *found.logprobs[2:]),
                found.functional_sha256,
                True,
                True,
            )
        return found

    monkeypatch.setattr(batch_control, "whole_steps", drifting)
    run(study, "batch_control", tmp_path / "run", *BF16, "--limit", 1, expected=3)
    (row,) = ledger(tmp_path / "run")
    assert [gate for gate, passed in row["gates"].items() if not passed] == ["replica_pair"]
    assert row["comparisons"]["pair:pair_replica"]["logprobs"]["first_divergence"] == 1
