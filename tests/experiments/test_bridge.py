"""bridge on a tiny checkpoint: an outcome-blind panel, live against incremental, gates, resumption."""

import json

import pytest

import experiments.bridge as bridge
from experiments.run.inputs import open_bank, select_spread
from minimodel.bits import bits
from tests.experiments.runs import ROWS, altered, call, inputs, ledger, one_line, open_finished, run, summary_of
from tests.helpers import write_lines

BF16 = ("--dtype", "bf16")


@pytest.fixture(scope="module")
def finished(every_run):
    out, printed = every_run["bridge"], every_run.printed["bridge"]
    assert f"live and incremental equal: cache {ROWS}/{ROWS}" in printed
    assert f"Fewer rows than the design wants: {ROWS} of 12 rows (the source has {ROWS})." in printed
    return out


def test_live_and_incremental_are_one_boundary_in_every_bit(finished):
    _, rows, summary = open_finished(finished)
    for row in rows:
        pair = row["comparisons"]["live:incremental"]
        assert pair["cache"]["exact"] and pair["logits"]["exact"] and pair["suffix"]["exact"]
        assert row["arms"]["live"]["cache_sha256"] == row["arms"]["incremental"]["cache_sha256"]
        assert row["boundary_length"] == row["prefix"]["length"]
    assert {part: block["count"] for part, block in summary["identity"].items()} == dict.fromkeys(
        ("cache", "logits", "suffix", "all"), ROWS
    )


def test_the_saved_prefix_is_recorded_and_not_a_gate(study, finished, tmp_path):
    _, rows, summary = open_finished(finished)
    # the same code, machine and checkpoint reach the saved prefix again
    assert summary["saved_prefix_agreement"]["count"] == ROWS
    assert all(row["saved_prefix"]["first_divergence"] is None for row in rows)
    # FP32 reaches other prefixes on some rows, and no gate fails
    run(study, "bridge", tmp_path / "fp32", "--dtype", "fp32", "--limit", 3)
    other = ledger(tmp_path / "fp32")
    assert all(row["passed"] for row in other)
    for row in other:
        agrees = row["saved_prefix"]["sha256"] == row["prefix"]["sha256"]
        assert row["saved_prefix"]["agrees"] == agrees == (row["saved_prefix"]["first_divergence"] is None)


def test_the_panel_is_frozen_before_decoding_and_blind_to_outcomes(study, finished, tmp_path):
    manifest, _, _ = open_finished(finished)
    bank = open_bank(study / "runs/matrix-bf16")
    chosen = select_spread(bank.prefixes, ROWS)
    assert [entry["row"] for entry in manifest["panel"]["rows"]] == [prefix.id for prefix in chosen]
    # other outcomes and answers, the same lengths: the same panel

    def change(rows):
        for arm in (arm for row in rows for arm in row["arms"].values()):
            arm["correct"], arm["answer"], arm["suffix"] = not arm["correct"], [], [1, 2, 3]

    source = altered(study / "runs/matrix-bf16", tmp_path / "matrix", change)
    assert select_spread(open_bank(source).prefixes, 12) == select_spread(bank.prefixes, 12)


def test_an_incremental_boundary_with_one_other_bit_is_an_endpoint_and_not_a_gate(study, tmp_path, monkeypatch):
    real = bridge.incremental_steps

    def flawed(model, state):
        boundary = yield from real(model, state)
        bits(boundary.cache.keys(1))[:, 0, 2, 1] ^= 1
        return boundary

    monkeypatch.setattr(bridge, "incremental_steps", flawed)
    run(study, "bridge", tmp_path / "one", *BF16, "--limit", 1)
    (row,) = ledger(tmp_path / "one")
    cache = row["comparisons"]["live:incremental"]["cache"]
    assert cache["differing"] == 2 and cache["first_difference"] == {"layer": 1, "tensor": "key", "position": 2}
    identity = summary_of(tmp_path / "one")["identity"]
    assert {part: identity[part]["count"] for part in ("cache", "logits", "all")} == {"cache": 0, "logits": 1, "all": 0}
    assert identity["suffix"]["count"] == row["comparisons"]["live:incremental"]["suffix"]["exact"]


def test_what_does_not_fit_is_refused_in_one_line(study, tmp_path):
    tasks = [json.loads(line) for line in (study / "tasks.jsonl").read_text().splitlines()]
    other = {**tasks[1], "question": "Another?"}
    for given, line in (
        ([tasks[0], other, *tasks[2:]], "task t001: expected the prompt that its prefix begins with, found another"),
        ([tasks[0], *tasks[2:]], "expected a task for the bank's row t001, found none"),
    ):
        path = write_lines(tmp_path / "tasks.jsonl", *given)
        options = [*BF16, *inputs(study, tasks=False), "--tasks", path, "--out", tmp_path / "out"]
        one_line(call("bridge", *options, cwd=study), line)
    assert not (tmp_path / "out").exists()
