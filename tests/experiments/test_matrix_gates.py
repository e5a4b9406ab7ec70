"""A matrix row that fails a gate ends the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.commands import environment
from tests.experiments.matrices import ROWS, arguments, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("matrix"))


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
    assert "gates FAILED on 5 rows; endpoints withheld: gates failed on 5 of 5 rows" in done.stdout
    assert "disagree" not in done.stdout, "an endpoint of a failed run"
    summary = json.loads((tmp_path / "p0/summary.json").read_text())
    assert summary["no_result"].endswith("endpoints are over 5 rows") and not summary["passed"]
    assert "gates failed on 5 of 5 rows" in (tmp_path / "p0/report.md").read_text()


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
