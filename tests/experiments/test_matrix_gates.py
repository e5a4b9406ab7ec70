"""The matrix's gates: each fails on its own defect, and a row that fails ends the run."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import experiments.harness.arms as arms
import experiments.matrix as matrix
from cache.build import build_live
from decode.contract import Contract
from decode.greedy import Suffix
from decode.state import State
from experiments.harness.progress import Progress
from experiments.harness.saving import Saving
from experiments.harness.tasks import Task
from minimodel import NumericContract, load_model
from minimodel.numbers import bits
from tests.experiments.commands import environment
from tests.experiments.matrices import ROWS, arguments, write_inputs
from tests.tiny import TASK


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def ready(inputs):
    model = load_model(inputs / "tiny", NumericContract("bf16", threads=1))
    contract = Contract.load(inputs / "tiny")
    task = Task("t", TASK["question"], tuple(TASK["choices"]), "C")
    return model, task, State.prompt(contract, task.question, task.choices)


def run_row(ready) -> dict:
    model, task, prompt = ready
    nothing = Saving(Path(), False, frozenset(), None, None)
    return matrix.matrix_row(model, task, prompt, 0, Progress(1, 0, quiet=True), nothing)


def test_gates_pass_and_each_gate_fails_on_its_own_defect(ready, monkeypatch):
    assert run_row(ready)["passed"]
    suffix = arms.greedy_suffix

    def late_token(model, boundary):
        found = suffix(model, boundary)
        late_token.calls += 1
        if late_token.calls != 2:  # the live replica's
            return found
        return dataclasses.replace(found, tokens=(*found.tokens[:-2], found.tokens[-2] ^ 1, found.tokens[-1]))

    late_token.calls = 0
    monkeypatch.setattr(arms, "greedy_suffix", late_token)
    row = run_row(ready)
    assert not row["gates"]["replica_live"] and row["gates"]["replica_prefill"] and not row["passed"]

    def first_token(model, boundary) -> Suffix:
        found = suffix(model, boundary)
        return dataclasses.replace(found, tokens=(found.tokens[0] ^ 1, *found.tokens[1:]))

    monkeypatch.setattr(arms, "greedy_suffix", first_token)
    assert not run_row(ready)["gates"]["argmax"]
    monkeypatch.setattr(arms, "greedy_suffix", suffix)

    def shared(model, prompt, **options):
        live = build_live(model, prompt, **options)
        return dataclasses.replace(live, rebuild=lambda: live)  # the "replica" is the boundary itself

    monkeypatch.setattr(matrix, "build_live", shared)
    row = run_row(ready)
    assert not row["gates"]["storage_disjoint"] and row["gates"]["replica_live"]

    def flipped(model, prompt, **options):
        live = build_live(model, prompt, **options)

        def replica():
            copy = dataclasses.replace(live, cache=live.cache.copy(), logits=live.logits.clone())
            with torch.inference_mode():
                bits(copy.cache.values(1))[:, 0, 3, 5] ^= 1
            return copy

        return dataclasses.replace(live, rebuild=replica)

    monkeypatch.setattr(matrix, "build_live", flipped)
    row = run_row(ready)
    assert not row["gates"]["replica_live"] and row["gates"]["storage_disjoint"]


def test_a_gate_that_fails_ends_the_run_with_code_3(inputs, tmp_path):
    script = "import experiments.matrix as m\nm.replica_exact = lambda left, right: left.name != 'prefill'\nm.main()\n"
    for preflight, rows in ((2, 1), (0, ROWS)):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                script,
                *map(str, arguments(inputs, "--preflight", preflight, "--out", f"p{preflight}")),
            ],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 3, done.stderr
        assert (tmp_path / f"p{preflight}/rows.jsonl").read_bytes().count(b"\n") == rows
    assert "gates FAILED on 5 rows" in done.stdout
    assert "GATES FAILED" in (tmp_path / "p0/report.md").read_text()


def test_copies_that_disagree_fail_the_row_closed(inputs, tmp_path):
    script = (
        "import experiments.matrix as m\n"
        "import torch\n"
        "build = m.build_prefill\n"
        "def broken(model, state, **options):\n"
        "    boundary = build(model, state, **options)\n"
        "    with torch.inference_mode():\n"
        "        boundary.cache.keys(2)[1, 0, 0, 0] += 1\n"
        "    boundary.cache.require_equal_copies()\n"
        "    return boundary\n"
        "m.build_prefill = broken\n"
        "m.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments(inputs, "--out", "run"))],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "preflight failed: row t000: cache layer 2 key: the physical copies differ in bits" in done.stdout
