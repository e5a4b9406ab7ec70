"""Rows shared out over ranks: the bytes of a single process, whatever number of ranks, whatever dies."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import experiments.run.designs as retained_live
from tests.experiments.run.jobs import run_job
from tests.experiments.run.sharded import die_at, forbid, require_same, sharded, stop_at_row, there
from tests.experiments.runs import command_module, inputs, run
from tests.faults.conftest import Small
from tests.faults.forked import CRASHED


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_the_bytes_of_one_process_and_rank_0_alone_speaks(
    small: Small, alone: Path, tmp_path: Path, size: int
) -> None:
    out = tmp_path / "run"
    job = sharded(small, out, size)
    assert job.code == 0, job.stderr
    require_same(out, alone)
    assert job.stdout[0].startswith("matrix bf16: 9 rows, gates all passed") and f"on {size} ranks" in job.stderr[0]
    assert job.stdout[1:] == job.stderr[1:] == [""] * (size - 1)
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    order = json.loads((out / "manifest.json").read_text())["row_order"]
    # two phases, the preflight's two rows and the other seven, each dealt from rank 0 on
    ranks = [*(i % size for i in range(2)), *(i % size for i in range(7))]
    assert [(t["row"], t["rank"], t["world_size"]) for t in timing] == [(row, r, size) for row, r in zip(order, ranks)]


@pytest.mark.parametrize("sizes", [(3, 3), (8, 2)])
def test_each_rank_decodes_rows_together(small: Small, alone: Path, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Each its own number; rows may come to a partial ledger in another order, and rows.jsonl does not show it."""
    given: dict[int, list[object]] = {rank: ["--batch-size", size] for rank, size in enumerate(sizes)}
    job = sharded(small, tmp_path / "run", 2, given=given)
    assert job.code == 0, job.stderr
    require_same(tmp_path / "run", alone)


def test_a_rank_that_computes_other_bits_moves_the_ledger(small: Small, alone: Path, tmp_path: Path) -> None:
    """The control: the comparison sees one rank's rows."""

    def flip(rank: int) -> None:
        real = retained_live.live_steps

        def flipped(model: Any, prompt: Any, **options: Any) -> Any:
            with torch.inference_mode():
                model.norm[0] += 2**-6
            return real(model, prompt, **options)

        if rank == 1:
            retained_live.live_steps = flipped

    assert sharded(small, tmp_path / "run", 2, before=flip).code in (0, 3)
    mine, theirs = ((p / "rows.jsonl").read_bytes().splitlines() for p in (tmp_path / "run", alone))
    assert [a == b for a, b in zip(mine, theirs)] == [True, False, True, False, True, False, True, False, True]


def test_a_killed_rank_loses_nothing_and_any_number_of_ranks_goes_on(small: Small, alone: Path, tmp_path: Path) -> None:
    """Three ranks, one killed; two, the leader killed; then one process: nothing that was written is decoded again."""
    out = tmp_path / "run"
    # how many rows each rank decodes before it waits or, the victim, dies; how many are on disk then
    for victim, rows, held in ((1, [2, 2, 1], 5), (0, [1, 1], 7)):

        def stop(rank: int, victim: int = victim, rows: list[int] = rows, held: int = held) -> None:
            stop_at_row(rows[rank], lambda: die_at(out, held) if rank == victim else signal.pause())

        job = sharded(small, out, len(rows), before=stop)
        assert job.code == job.codes[victim] == 128 + signal.SIGKILL
        assert [code for rank, code in enumerate(job.codes) if rank != victim] == [130] * (len(rows) - 1)
        assert job.errors()[0] == "interrupted" and len(job.errors()) == 2
        assert f"resume with: torchrun --nproc-per-node {len(rows)} -m experiments.matrix --dtype" in job.errors()[1]
        assert len(there(out)) == held
    ended = small.run(out, before=lambda: stop_at_row(2, forbid))
    assert ended.code == 0 and "7 rows are already there and kept" in ended.stderr
    require_same(out, alone)


def test_ranks_go_on_where_one_process_stopped(small: Small, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = small.run(out, before=lambda: stop_at_row(4, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert ended.code == 130 and len(there(out)) == 4
    job = sharded(small, out, 2)
    assert job.code == 0 and "4 rows are already there and kept" in job.stderr[0]
    require_same(out, alone)
    # a finished run is summed up again, decoding nothing; --fresh sets it aside
    assert sharded(small, out, 3, before=lambda rank: stop_at_row(0, forbid)).code == 0
    require_same(out, alone)
    assert sharded(small, out, 2, "--fresh").code == 0
    require_same(out, alone)
    require_same(tmp_path / "run.1", alone)


def test_boundaries_and_traces_are_those_of_one_process(small: Small, tmp_path: Path) -> None:
    more = ["--save-boundaries", "--trace", "t001", "--trace", "t002", "--limit", 4]
    assert small.run(tmp_path / "single", *more).code == 0
    job = sharded(small, tmp_path / "run", 2, *more)
    assert job.code == 0 and "not written" not in "".join(job.stderr)
    trees = [
        {p.relative_to(root): p.read_bytes() for name in ("boundaries", "traces") for p in (root / name).iterdir()}
        for root in (tmp_path / "single", tmp_path / "run")
    ]
    assert len(trees[0]) == 2 * (4 + 2) and trees[0] == trees[1]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fixed_prefix", ()),
        ("bridge", ("--dtype", "bf16")),
        pytest.param("batch_control", ("--dtype", "bf16"), marks=pytest.mark.slow),
        pytest.param("replication", ("--dtype", "bf16"), marks=pytest.mark.slow),
        pytest.param("causes", ("--dtype", "bf16", "--rows", 2), marks=pytest.mark.slow),
    ],
)
def test_the_other_experiments_share_their_rows_too(study: Path, tmp_path: Path, name: str, more: tuple) -> None:
    """Rows of several dtypes or cells, panels in another order, inputs kept beside the ledger."""
    single, out = tmp_path / "single", tmp_path / "run"
    options = {"checkpoint": "later" if name == "replication" else "primary", "tasks": name != "replication"}
    run(study, name, single, *more, **options)
    job = run_job([rank_of(study, name, out, *more, **options)] * 2, tmp_path / "said")
    assert job.code == 0, job.stderr
    require_same(out, single)
    ranks = {json.loads(line)["rank"] for line in (out / "timing.jsonl").read_text().splitlines()}
    assert ranks == {0, 1}
    kept = {path.name for path in single.iterdir()}
    assert kept == {path.name for path in out.iterdir()} and all(
        (out / file).read_bytes() == (single / file).read_bytes() for file in kept if file == "bank.jsonl"
    )


def rank_of(study: Path, name: str, out: Path, *more: object, **options: Any) -> Callable[[], int]:
    def body() -> int:
        arguments = list(map(str, inputs(study, "--out", out, *more, **options)))
        os.chdir(study)
        sys.argv = [name, *arguments]
        command_module(f"experiments.{name}").main(args=arguments, prog_name=name)
        return CRASHED  # a command ends by sys.exit, always

    return body
