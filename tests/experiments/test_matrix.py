"""The matrix end to end on the tiny checkpoint: arms, gates, determinism, resumption, exit codes."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import experiments.matrix as matrix
from cache.build import build_live
from decode.contract import Contract
from decode.greedy import Suffix
from decode.state import State
from experiments.harness.progress import Progress
from experiments.harness.rundir import open_finished
from experiments.harness.saving import Saving
from experiments.harness.tasks import Task
from minimodel import NumericContract, load_model
from minimodel.numbers import bits
from tests.experiments.commands import command, environment, start, write_tasks
from tests.tiny import TASK, write_checkpoint

ROWS = 5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    write_checkpoint(root / "tiny")
    write_tasks(root / "tasks.jsonl", ROWS)
    return root


def arguments(inputs: Path, *more: object) -> list[object]:
    return [
        "--dtype",
        "bf16",
        "--checkpoint",
        inputs / "tiny",
        "--tasks",
        inputs / "tasks.jsonl",
        "--threads",
        1,
        "--preflight",
        2,
        *more,
    ]


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("run")
    done = command("experiments.matrix", *arguments(inputs), cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "matrix bf16: 5 rows, gates all passed; live:prefill disagree on suffix" in done.stdout
    assert done.stdout.strip().endswith("run: runs/matrix-bf16")
    return cwd / "runs" / "matrix-bf16"


def test_a_row_has_the_four_arms_three_comparisons_and_every_gate(finished):
    manifest, rows, summary = open_finished(finished)
    assert [row["row"] for row in rows] == manifest["row_order"]
    for row in rows:
        assert tuple(row["arms"]) == matrix.ARMS
        assert set(row["comparisons"]) == {"live:live_replica", "prefill:prefill_replica", "live:prefill"}
        assert tuple(sorted(row["gates"])) == tuple(sorted(matrix.GATES))
        assert row["passed"] and all(row["gates"].values())
        cache = row["comparisons"]["live:prefill"]["cache"]
        assert not cache["exact"] and 0 < cache["relative_l2"] < 0.1
        assert row["comparisons"]["live:live_replica"]["cache"]["differing"] == 0
        assert row["arms"]["live"]["cache_sha256"] == row["arms"]["live_replica"]["cache_sha256"]
        assert row["arms"]["live"]["cache_sha256"] != row["arms"]["prefill"]["cache_sha256"]
    assert summary["passed"] and summary["suffix_disagreement"]["n"] == ROWS
    assert (finished / "report.md").read_text().startswith("# matrix, bf16")
    assert len((finished / "timing.jsonl").read_text().splitlines()) == ROWS


def test_the_manifest_names_everything_that_decides_a_bit(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["numeric"][0]["dtype"] == "bf16" and manifest["numeric"][0]["threads"] == 1
    assert manifest["numeric"][0]["attention"] == "repeat_kv" and manifest["numeric"][0]["linear"] == "plain"
    assert manifest["environment"]["torch"]
    assert set(manifest["checkpoint"]) == {
        "config.json",
        "contract.json",
        "model.safetensors",
        "tokenizer.json",
        "role_embedding.safetensors",
    }
    assert manifest["caps"] == {"branch": 10, "merge": 12, "answer": 6}


def test_the_same_command_twice_writes_the_same_bytes(inputs, finished, tmp_path):
    done = command("experiments.matrix", *arguments(inputs), cwd=tmp_path, PYTHONHASHSEED="7", TZ="Asia/Tokyo")
    assert done.returncode == 0
    assert (tmp_path / "runs/matrix-bf16/rows.jsonl").read_bytes() == (finished / "rows.jsonl").read_bytes()
    # the control: another kernel writes other bytes
    other = command(
        "experiments.matrix",
        *arguments(inputs, "--attention", "eager"),
        cwd=tmp_path,
    )
    assert other.returncode == 2 and "attention" in other.stderr
    other = command("experiments.matrix", *arguments(inputs, "--attention", "eager", "--out", "eager"), cwd=tmp_path)
    assert other.returncode == 0
    assert (tmp_path / "eager/rows.jsonl").read_bytes() != (finished / "rows.jsonl").read_bytes()


def wait_for_rows(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline, "no rows appeared"
        time.sleep(0.005)


def test_a_run_killed_in_the_middle_ends_with_the_same_bytes(inputs, finished, tmp_path):
    process = start("experiments.matrix", *arguments(inputs, "--out", "run"), cwd=tmp_path)
    wait_for_rows(tmp_path / "run/rows.jsonl", 2)
    process.kill()
    process.communicate()
    left = (tmp_path / "run/rows.jsonl").read_bytes()
    assert left.count(b"\n") < ROWS, "the kill came too late to show anything"
    (tmp_path / "run/rows.jsonl").write_bytes(left + b'{"row":"t0')  # as a kill inside the write would leave it
    done = command("experiments.matrix", *arguments(inputs, "--out", "run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dropped a torn last line of 10 bytes" in done.stderr
    assert (tmp_path / "run/rows.jsonl").read_bytes() == (finished / "rows.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_130_and_prints_the_command_that_resumes(inputs, tmp_path, number):
    process = start("experiments.matrix", *arguments(inputs, "--out", "run", "--fresh"), cwd=tmp_path)
    wait_for_rows(tmp_path / "run/rows.jsonl", 1)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    resume = next(line for line in stderr.splitlines() if line.startswith("resume with: python -m experiments.matrix "))
    assert "--fresh" not in resume and "--out run" in resume
    assert (tmp_path / "run/rows.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--checkpoint", "nowhere"), "nowhere: expected a file, found nothing|nowhere"),
        (("--tasks", "nowhere.jsonl"), "nowhere.jsonl: expected a file, found nothing"),
        (("--device", "tpu"), "device: expected cpu, cuda or cuda:N, found 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(inputs, tmp_path, more, message):
    done = command("experiments.matrix", *arguments(inputs, *more), cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and any(part in lines[0] for part in message.split("|"))
    assert not (tmp_path / "runs").exists(), "nothing is written for refused input"


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
    suffix = matrix.greedy_suffix

    def late_token(model, boundary):
        found = suffix(model, boundary)
        late_token.calls += 1
        if late_token.calls != 2:  # the live replica's
            return found
        return dataclasses.replace(found, tokens=(*found.tokens[:-2], found.tokens[-2] ^ 1, found.tokens[-1]))

    late_token.calls = 0
    monkeypatch.setattr(matrix, "greedy_suffix", late_token)
    row = run_row(ready)
    assert not row["gates"]["replica_live"] and row["gates"]["replica_prefill"] and not row["passed"]

    def first_token(model, boundary) -> Suffix:
        found = suffix(model, boundary)
        return dataclasses.replace(found, tokens=(found.tokens[0] ^ 1, *found.tokens[1:]))

    monkeypatch.setattr(matrix, "greedy_suffix", first_token)
    assert not run_row(ready)["gates"]["argmax"]
    monkeypatch.setattr(matrix, "greedy_suffix", suffix)

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
