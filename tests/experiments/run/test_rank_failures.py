"""One rank fails: one line, one exit code, and no rank that waits for ever."""

import json
import signal
from pathlib import Path

import pytest

import experiments.run.experiment as experiment
from experiments.run import exits as ranks
from tests.experiments.run.jobs import Job
from tests.experiments.run.sharded import require_same, sharded, there
from tests.faults.conftest import Small
from tests.faults.forked import Ended
from tests.faults.test_disk import limit_file_size


def broken_gate(rank: int, where: int, after: int = 0) -> None:
    """Lets a replica gate fail on one rank, from its row number `after` on."""
    real, left = experiment.replica_exact, iter(range(2 * after))
    if rank == where:
        experiment.replica_exact = lambda one, two: next(left, None) is not None and real(one, two)


def test_a_gate_that_fails_on_one_rank_ends_the_job_with_code_3(small: Small, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = sharded(small, out, 2, before=lambda rank: broken_gate(rank, 1, after=1))
    assert job.code == job.codes[0] == 3 and job.errors() == []
    assert job.stdout[0].count("FAILED on 3 rows") == 1 and job.stdout[1] == ""
    assert json.loads((out / "summary.json").read_text())["failed_rows"] == ["t003", "t005", "t007"]


@pytest.mark.parametrize("where", [0, 1])
def test_a_preflight_that_fails_on_one_rank_stops_all_of_them(
    small: Small, alone: Path, tmp_path: Path, where: int
) -> None:
    """No rank decodes a row beyond the preflight; what is there is what one process leaves, and it stops again."""
    out, single = tmp_path / "run", tmp_path / "single"
    job = sharded(small, out, 2, before=lambda rank: broken_gate(rank, where))
    assert job.code == job.codes[0] == 3 and job.errors() == []
    assert job.stdout == [f"preflight failed: row t00{where}: replica_live, replica_prefill; the run in {out} stopped "
                          "before the remaining rows\n", ""]  # fmt: skip
    assert small.run(single, before=lambda: broken_gate(0, 0, after=where)).code == 3
    assert (out / "rows.jsonl").read_bytes() == (single / "rows.jsonl").read_bytes()
    assert there(out) == {"t000", "t001"} and not (out / "summary.json").exists()
    again: list[Job | Ended] = [small.run(out), sharded(small, out, 3)]
    assert [ended.code for ended in again] == [3, 3]


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_on_one_rank_is_one_line_and_code_2(small: Small, alone: Path, tmp_path: Path, where: int) -> None:
    out, size = tmp_path / "run", len((alone / "rows.jsonl").read_bytes().splitlines()[0])
    limit = int(2.5 * size)
    job = sharded(small, out, 2, before=lambda rank: limit_file_size(limit) if rank == where else None)
    assert job.code == 2 == job.codes[where], job.stderr
    [line] = job.errors()
    assert f"{out}/" in line and "File too large" in line
    assert sharded(small, out, 2).code == 0
    require_same(out, alone)


def test_bad_input_that_every_rank_finds_is_one_line(small: Small, tmp_path: Path) -> None:
    job = sharded(small, tmp_path / "run", 3, "--tasks", "nowhere.jsonl")
    assert job.code == 2
    assert job.errors() == ["error: nowhere.jsonl: expected a file, found nothing"]


def test_a_rank_under_another_contract_is_refused_by_name(small: Small, tmp_path: Path) -> None:
    """As on a machine whose processor or library differs from rank 0's."""
    job = sharded(small, tmp_path / "run", 2, given={1: ["--kernels", "packed_gqa"]})
    assert job.code == 2
    [line] = job.errors()
    assert (
        line.startswith("error: rank 1: ") and 'numeric[0].attention: expected "packed_gqa", found "repeat_kv"' in line
    )


def test_a_rank_stopped_before_it_joined_keeps_silent_too(small: Small, tmp_path: Path) -> None:
    """One fails at once; the others are slow to start and get the launcher's SIGTERM before they know of the job."""

    def slow(rank: int) -> None:
        real = ranks.require_sharded

        def waiting(module: str) -> None:
            if rank > 0:
                signal.pause()
            real(module)

        ranks.require_sharded = waiting

    job = sharded(small, tmp_path / "run", 3, "--tasks", "nowhere.jsonl", before=slow)
    assert job.codes == [2, 130, 130]
    assert job.errors() == ["error: nowhere.jsonl: expected a file, found nothing"]
