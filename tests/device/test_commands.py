"""The commands on one device, as a user calls them: matrix, fixed prefixes, transplant, machine, benchmark."""

import json

import pytest

from experiments import machine
from experiments.benchmark.arms import COLUMNS
from tests import THREADS
from tests.experiments.runs import call, ledger, manifest_of, summary_of
from tests.helpers import read_json

# the same commands on the CPU are tested one by one in tests/experiments; here they check this file's own steps
CPU = pytest.param("cpu", marks=pytest.mark.slow)
pytestmark = pytest.mark.parametrize("here", [CPU, "cuda"], indirect=True, scope="session")


@pytest.fixture(scope="module")
def root(here, tmp_path_factory):
    """The matrix, the fixed prefixes made from it, and the transplant made from those."""
    root = tmp_path_factory.mktemp(f"commands-{here.device}")
    tasks = ["--tasks", here.tasks]
    command(here, root, "matrix", "--dtype", "bf16", "--limit", here.rows, *tasks)
    command(here, root, "fixed_prefix", "--dtype", "bf16", *tasks)
    command(here, root, "transplant", "--dtype", "bf16", "--source", "runs/fixed_prefix-bf16")
    return root


def command(here, root, name, *more):
    """Runs one command to its end with exit code 0; its output goes under root/runs."""
    given = ["--checkpoint", here.checkpoint, "--device", here.device, "--threads", THREADS, "--quiet"]
    done = call(name, *given, *more, cwd=root)
    assert done.exit_code == 0, (done.output, done.stderr)


def test_the_matrix_passes_every_gate(here, root):
    rows, summary = ledger(root / "runs/matrix-bf16"), summary_of(root / "runs/matrix-bf16")
    assert len(rows) == here.rows and all(row["passed"] for row in rows) and summary["passed"]
    [numeric] = manifest_of(root / "runs/matrix-bf16")["numeric"]
    assert numeric["device"] == here.device


def test_transplants_follow_their_donors(here, root):
    summary = summary_of(root / "runs/transplant-bf16")
    assert summary["passed"] and summary["rows"] == here.rows
    recovery = summary["endpoints"]["bidirectional_donor_recovery"]
    assert recovery["count"] == recovery["n"]


def test_the_benchmark_fills_its_columns(here, root):
    counts = {"repeats": 1, "long-repeats": 1, "steps": 4, "block": 24, "buffer": 1}
    lengths = ["--context", "24", "--prefill", "48", "--prefix", "60", "--only", "decode,prefill,build,row"]
    short = [text for key, value in counts.items() for text in (f"--{key}", str(value))]
    reference = ["--reference", "tests.hf.bench_arm", "--columns", ",".join(COLUMNS)]
    command(here, root, "benchmark", "--tasks", here.tasks, *short, *lengths, *reference, "--out", "benchmark")
    found = read_json(root / "benchmark/benchmark.json")
    missing = set(COLUMNS) - set(found["columns"])
    assert found["unequal_bits"] == [] and len(found["rows"]) == 4
    assert {"repeat_kv", "packed_gqa"} <= set(found["columns"])
    assert all(any(name in sentence for sentence in found["omitted"]) for name in missing), found["omitted"]
    for row in found["rows"]:
        for cell in row["columns"].values():
            assert cell["seconds"]["median"] > 0


def test_machine_says_what_holds_for_each_dtype_and_kernel(here, root, monkeypatch):
    if here.device == "cpu":  # few requests in one step are enough to hold the command to its form
        monkeypatch.setattr(machine, "MOST", 3)
    given = ["--checkpoint", here.checkpoint, "--device", here.device, "--threads", THREADS]
    done = call("machine", *given, "--json", "--out", root / "machine.json", cwd=root)
    assert done.exit_code == 0, (done.output, done.stderr)
    found = read_json(root / "machine.json")
    assert json.loads(done.stdout) == found and found["device"] == here.device
    rows = {(row["dtype"], row["attention"], row["linear"]): row for row in found["rows"]}
    plain = rows["bf16", "repeat_kv", "plain"]
    assert plain["copies_equal"] and plain["step_seconds"] > 0, plain
    for row in rows.values():
        assert "expected" in row["refused"] if "refused" in row else row["copies_equal"] or row["reasons"], row
