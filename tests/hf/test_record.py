"""The recorder on a small checkpoint: its ledger, boundaries and traces are ours byte for byte, and faults are not."""

import json
import re

import pytest
from click.testing import CliRunner

from cache.boundary import SCHEMA as BOUNDARY
from cache.build import build_incremental
from cache.storage import open_tensors
from decode.greedy import greedy_suffix
from decode.state import State
from experiments import matrix
from experiments.run.experiment import Arm, arm_entry
from experiments.run.options import DEMO
from experiments.run.saving import SCHEMA as TRACE
from experiments.run.tasks import load_tasks
from minimodel.bits import same_bits
from minimodel.load import load_model
from tests import THREADS
from tests.experiments.commands import python
from tests.experiments.runs import call, ledger, manifest_of, one_line, summary_of
from tests.hf import record, versions
from tests.hf.conftest import ROWS, numeric

ARMS = ("live", "prefill")


@pytest.fixture(scope="module")
def recorded(study, dtype):
    """Runs a command on the study, whose output goes to OUT-DTYPE there; returns that directory."""

    def run(main, out, *more):
        done = CliRunner().invoke(main, [*inputs(study, dtype, out), *map(str, more)])
        assert done.exit_code == 0, done.output
        return study / f"{out}-{dtype}"

    return run


def inputs(study, dtype, out):
    files = ["--checkpoint", study / "checkpoint", "--tasks", study / "tasks.jsonl", "--out", study / f"{out}-{dtype}"]
    return [*map(str, ["--dtype", dtype, *files, "--threads", THREADS, "--quiet"])]


SAVED = ("--save-boundaries", "--trace", "t001")


@pytest.fixture(scope="module")
def theirs(recorded):
    return recorded(record.main, "theirs", *SAVED)


@pytest.fixture(scope="module")
def ours(recorded):
    return recorded(matrix.main, "ours", "--kernels", versions.matching_kernel(), *SAVED)


@pytest.fixture(scope="module")
def under_another_kernel(recorded):
    return recorded(matrix.main, "other", "--attention", "eager")


def test_rows_are_ours_byte_for_byte(theirs, ours, under_another_kernel):
    assert (theirs / "rows.jsonl").read_bytes() == (ours / "rows.jsonl").read_bytes()
    assert len(ledger(theirs)) == ROWS and all(row["passed"] for row in ledger(theirs))
    assert summary_of(theirs) == summary_of(ours)
    # control: under another kernel some bit of the ledger differs
    assert (under_another_kernel / "rows.jsonl").read_bytes() != (theirs / "rows.jsonl").read_bytes()
    # prefill against live is not exact and replicas are: the equal digests are not those of one construction
    for row in ledger(theirs):
        exact = {pair: entry["cache"]["exact"] for pair, entry in row["comparisons"].items()}
        assert exact == {"live:live_replica": True, "prefill:prefill_replica": True, "live:prefill": False}


@pytest.mark.parametrize(
    "folder, names, schema", [("boundaries", ("t000", "t001"), BOUNDARY), ("traces", ("t001",), TRACE)]
)
def test_saved_tensors_are_ours(folder, names, schema, theirs, ours, under_another_kernel):
    files = sorted(f"{name}-{arm}.safetensors" for name in names for arm in ARMS)
    assert sorted(path.name for path in (theirs / folder).iterdir()) == files
    for file in files:
        mine, other = (open_tensors(run / folder / file, schema) for run in (ours, theirs))
        assert mine.names == other.names and len(mine.names) > 6
        assert all(same_bits(mine.tensor(name), other.tensor(name)) for name in mine.names)
        for key in ("tokens", "functional_sha256", "contract", "checkpoint", "construction", "row"):
            assert mine.header[key] == other.header[key], key
        assert (mine.header["source"], other.header["source"]) == ("stage-replay", record.SOURCE)


def test_crosscheck_says_equal_and_names_the_kernel(theirs, ours, under_another_kernel, study, dtype):
    """The kernel at one dtype, as every kernel is computed again for it."""
    same = call("crosscheck", ours, theirs)
    assert same.exit_code == 0, same.output
    again = ["--checkpoint", study / "checkpoint"] if dtype == "bf16" else ["--no-rerun"]
    differs = call("crosscheck", under_another_kernel, theirs, *again)
    assert differs.exit_code == 3, differs.output
    assert f'transformers: A nothing, B "{versions.INSTALLED}"' in differs.output
    if dtype == "bf16":
        assert "A is equal under eager of ours" in differs.output
        assert re.search(rf"B is equal under .*{versions.matching_kernel()}.* of ours", differs.output), differs.output
    for file in ("boundaries/t000-live.safetensors", "traces/t001-prefill.safetensors"):
        assert call("crosscheck", ours / file, theirs / file).exit_code == 0


def test_manifest_names_transformers_and_every_setting(theirs, ours, dtype):
    mine, other = (manifest_of(run) for run in (ours, theirs))
    [settings], [expected] = other["numeric"], mine["numeric"]
    assert settings["attention"] == f"{record.SOURCE} sdpa"
    differing = {key for key in expected if expected[key] != settings.get(key)}
    assert differing == {"attention", "linear"} and set(settings) == set(expected)
    assert settings["threads"] == THREADS and settings["dtype"] == dtype
    assert other["source"] == record.SOURCE and other["environment"]["transformers"] == versions.INSTALLED
    for key in ("checkpoint", "tasks_sha256", "row_order", "caps", "visibility", "role_offset"):
        assert mine[key] == other[key], key


def test_incremental_arms(study, theirs, dtype, recorded):
    """--incremental adds two arms and three comparisons, equal to those of our own incremental boundary."""
    [row], plain = ledger(recorded(record.main, "incremental", "--incremental", "--limit", 1)), ledger(theirs)[0]
    assert all(row["arms"][name] == plain["arms"][name] for name in plain["arms"])
    assert row["gates"]["replica_incremental"] and row["comparisons"]["live:incremental"]["cache"]["exact"]
    model = load_model(study / "checkpoint", numeric(dtype))
    [task], _ = load_tasks(study / "tasks.jsonl", 1)
    contract = record.Contract.load(study / "checkpoint")
    boundary = build_incremental(model, State.from_tokens(contract, row["prefix"]["tokens"]))
    for name, each in (("incremental", boundary), ("incremental_replica", boundary.replica())):
        arm = Arm(each, greedy_suffix(model, each))
        assert json.loads(json.dumps(arm_entry(arm, task))) == row["arms"][name]


@pytest.mark.parametrize(
    "more, parts",
    [
        (("--trace", "unknown"), ("--trace", "'unknown'")),
        (("--checkpoint", "nowhere"), ("nowhere", "expected a checkpoint directory")),
        (("--tasks", "nothing.jsonl"), ("nothing.jsonl", "expected a file")),
        (("--devices", "cpu,cpu"), ("--device", "one device", "'cpu,cpu'")),
    ],
)
def test_bad_input_is_one_line(study, more, parts):
    one_line(CliRunner().invoke(record.main, [*inputs(study, "bf16", "refused"), *more]), *parts)
    assert not (study / "refused-bf16").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO / "primary").exists(), reason="the demo checkpoint has not been trained yet")
def test_demo_rows_are_ours(tmp_path, dtype):
    """In new processes: either may start itself again in MKL's reproducible mode."""
    given = ["--dtype", dtype, "--limit", "3", "--quiet", "--out"]
    ours = ["experiments.matrix", *given, str(tmp_path / "ours"), "--kernels", versions.matching_kernel()]
    for command in (["tests.hf.record", *given, str(tmp_path / "theirs")], ours):
        done = python("-m", *command)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs" / "rows.jsonl").read_bytes() == (tmp_path / "ours" / "rows.jsonl").read_bytes()


def test_without_transformers_the_recorder_says_what_to_install():
    script = "import sys; sys.modules['transformers'] = None; import tests.hf.record"
    done = python("-c", script)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: transformers: expected an installed release, found none; pip install -e '.[test]'"
    ]
