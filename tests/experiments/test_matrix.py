"""The matrix end to end on the tiny checkpoint: arms, gates, determinism, resumption, exit codes."""

import json
import signal
import time
from pathlib import Path

import pytest

from experiments.run.designs import RetainedLive
from tests.experiments.commands import command, start
from tests.experiments.matrices import ROWS, arguments, write_inputs
from tests.experiments.runs import call, one_line, open_finished


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("run")
    done = call("matrix", *arguments(inputs), cwd=cwd)
    assert done.exit_code == 0, done.stderr
    assert "matrix bf16: 5 rows, gates all passed; live:prefill disagree on suffix" in done.stdout
    assert done.stdout.strip().endswith("run: runs/matrix-bf16")
    return cwd / "runs" / "matrix-bf16"


def test_a_row_has_the_four_arms_three_comparisons_and_every_gate(finished):
    manifest, rows, summary = open_finished(finished)
    assert [row["row"] for row in rows] == manifest["row_order"]
    for row in rows:
        assert tuple(row["arms"]) == RetainedLive.arms
        assert set(row["comparisons"]) == {"live:live_replica", "prefill:prefill_replica", "live:prefill"}
        assert list(row["gates"]) == RetainedLive.gates()
        assert row["passed"] and all(row["gates"].values())
        cache = row["comparisons"]["live:prefill"]["cache"]
        assert not cache["exact"] and 0 < cache["relative_l2"] < 0.1
        assert row["comparisons"]["live:live_replica"]["cache"]["differing"] == 0
        assert row["arms"]["live"]["cache_sha256"] == row["arms"]["live_replica"]["cache_sha256"]
        assert row["arms"]["live"]["cache_sha256"] != row["arms"]["prefill"]["cache_sha256"]
        for arm in row["arms"].values():
            assert arm["logits_geometry"]["shape"] == [2, 288] and arm["logits_geometry"]["dtype"] == "bfloat16"
            assert arm["logits_geometry"]["device"] == "cpu" and len(arm["logits_geometry"]["stride"]) == 2
            # every suffix token but the one that ends the answer was fed
            assert arm["post_decode_length"] == row["prefix"]["length"] + len(arm["suffix"]) - 1
    assert summary["passed"] and summary["suffix_disagreement"]["n"] == ROWS and summary["no_result"] is None
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
    plan = manifest["plan"]
    assert plan["uncertainty"]["bootstrap_seed"] == 20260728 and plan["uncertainty"]["bootstrap_replicates"] == 20_000
    assert plan["uncertainty"]["bootstrap_streams"]["cross_suffix"] == 20
    assert plan["uncertainty"]["matrix_wilson_z"] == 1.96
    assert plan["interpretation"]["least_divergent"] == 12 and plan["interpretation"]["least_exact"] == 6
    assert plan["interpretation"]["precedence"][0] == "procedural-control failure"
    assert {key: plan["decode"][key] for key in ("temperature", "top_p", "top_k", "copies")} == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "copies": 2
    }  # fmt: skip


def test_the_same_command_twice_writes_the_same_bytes(inputs, finished, tmp_path):
    """Here in a new process, with another hash seed and time zone."""
    done = command("experiments.matrix", *arguments(inputs), cwd=tmp_path, PYTHONHASHSEED="7", TZ="Asia/Tokyo")
    assert done.returncode == 0
    assert (tmp_path / "runs/matrix-bf16/rows.jsonl").read_bytes() == (finished / "rows.jsonl").read_bytes()
    # the control: another kernel writes other bytes
    other = call("matrix", *arguments(inputs, "--attention", "eager"), cwd=tmp_path)
    assert other.exit_code == 2 and "attention" in other.stderr
    other = call("matrix", *arguments(inputs, "--attention", "eager", "--out", "eager"), cwd=tmp_path)
    assert other.exit_code == 0
    assert (tmp_path / "eager/rows.jsonl").read_bytes() != (finished / "rows.jsonl").read_bytes()


def wait_for_rows(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline, "no rows appeared"
        time.sleep(0.005)


def test_an_interrupted_run_prints_the_command_that_resumes_and_ends_in_the_same_bytes(inputs, finished, tmp_path):
    """In a new process; every other signal and moment is tried on forked ones (tests/faults/test_kills.py)."""
    process = start("experiments.matrix", *arguments(inputs, "--out", "run", "--fresh"), cwd=tmp_path)
    wait_for_rows(tmp_path / "run/rows.jsonl", 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    resume = next(line for line in stderr.splitlines() if line.startswith("resume with: python -m experiments.matrix "))
    assert "--fresh" not in resume and "--out run" in resume
    left = (tmp_path / "run/rows.jsonl").read_bytes()
    assert left.endswith(b"\n") and left.count(b"\n") < ROWS, "the interruption came too late to show anything"
    done = call("matrix", *arguments(inputs, "--out", "run"), cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "run/rows.jsonl").read_bytes() == (finished / "rows.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--checkpoint", "nowhere"), "nowhere: expected a file, found nothing|nowhere"),
        (("--tasks", "nowhere.jsonl"), "nowhere.jsonl: expected a file, found nothing"),
        (("--device", "tpu"), "device: expected cpu, cuda or cuda:N, found 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(inputs, tmp_path, more, message):
    line = one_line(call("matrix", *arguments(inputs, *more), cwd=tmp_path))
    assert any(part in line for part in message.split("|"))
    assert not (tmp_path / "runs").exists(), "nothing is written for refused input"
