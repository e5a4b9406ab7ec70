"""A matrix row that fails a gate ends the run."""

import json
from pathlib import Path

import pytest
import torch

import experiments.run.designs as retained_live
import experiments.run.experiment as experiment
from tests.experiments.matrices import ROWS, arguments, write_inputs
from tests.experiments.runs import call


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("matrix"))


def test_a_gate_that_fails_ends_the_run_with_code_3(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "replica_exact", lambda left, right: left.name != "prefill")
    for preflight, rows in ((2, 1), (0, ROWS)):
        given = arguments(inputs, "--preflight", preflight, "--out", f"p{preflight}")
        done = call("matrix", *given, cwd=tmp_path)
        assert done.exit_code == 3, done.output
        assert (tmp_path / f"p{preflight}/rows.jsonl").read_bytes().count(b"\n") == rows
    assert "gates FAILED on 5 rows; endpoints withheld: gates failed on 5 of 5 rows" in done.stdout
    assert "disagree" not in done.stdout, "an endpoint of a failed run"
    summary = json.loads((tmp_path / "p0/summary.json").read_text())
    assert summary["no_result"].endswith("endpoints are over 5 rows") and not summary["passed"]
    assert "gates failed on 5 of 5 rows" in (tmp_path / "p0/report.md").read_text()


def test_copies_that_disagree_fail_the_row_closed(inputs, tmp_path, monkeypatch):
    build = retained_live.build_prefill

    def broken(model, state, **options):
        boundary = build(model, state, **options)
        with torch.inference_mode():
            boundary.cache.keys(2)[1, 0, 0, 0] += 1
        boundary.cache.require_equal_copies()
        return boundary

    monkeypatch.setattr(retained_live, "build_prefill", broken)
    done = call("matrix", *arguments(inputs, "--out", "run"), cwd=tmp_path)
    assert done.exit_code == 3
    assert "preflight failed: row t000: cache layer 2 key: the physical copies differ in bits" in done.stdout
