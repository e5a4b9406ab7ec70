"""The row loop: one ledger whatever the number of rows decoded together, whatever the number of ranks, whatever dies;
what would change a bit, is damaged or belongs to another run is refused in one line."""

import json
import os
import shutil
import signal
import sys

import pytest
import torch

import experiments.run.designs as designs
import experiments.run.experiment as experiment
from decode.independence import Together, together_here
from experiments.run import loop
from experiments.run.designs import RetainedLive
from experiments.run.experiment import gate
from experiments.run.ledger import lock, seal
from experiments.run.loop import CACHES, batch_size, free_bytes
from tests.experiments.run.conftest import ROWS
from tests.experiments.run.jobs import die_at, forbid, require_same, run_job, sharded, there
from tests.experiments.runs import call, command_module, inputs, ledger, manifest_of, run, summary_of
from tests.faults.forked import CRASHED, limit_file_size, one_error, stop_after_rows
from tests.helpers import refused

BF16 = ["--dtype", "bf16"]


def only(size):
    """In place of the check: no more than `size` requests keep their bits."""
    return lambda model, most=16: Together(min(size, most), model, "the o map, 8 rows" if size < most else "")


@pytest.mark.parametrize("size", [1, 3])
def test_a_matrix_writes_one_ledger_whatever_the_number(study, tmp_path, size):
    """The study's own run chose its number itself."""
    run(study, "matrix", tmp_path / "run", *BF16, "--batch-size", size)
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (tmp_path / "run" / name).read_bytes() == (study / "runs/matrix-bf16" / name).read_bytes(), name
    said = manifest_of(tmp_path / "run")["information"]["batch"]
    assert next(iter(said.values())).startswith(f"{size} row")
    timing = [json.loads(line) for line in (tmp_path / "run/timing.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in timing] == [row["row"] for row in ledger(tmp_path / "run")]
    assert all(sum(entry["arms"].values()) <= entry["seconds"] + 0.01 for entry in timing)


def test_the_number_is_said_on_stderr_and_kept_beside_what_decides_bits(study, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "together_here", only(3))
    given = [part for part in inputs(study, "--out", tmp_path / "run", *BF16) if part != "--quiet"]
    done = call("matrix", *given, cwd=study)
    why = "3 rows at a time: the o map, 8 rows of the batch: other bits than alone"
    assert done.exit_code == 0 and why in done.stderr.splitlines()
    assert manifest_of(tmp_path / "run")["information"]["batch"] == {"all rows": why}
    again = call("matrix", *given, "--batch-size", 2, cwd=study)
    assert again.exit_code == 0, "another number resumes the same run"


def test_where_nothing_holds_rows_are_decoded_one_at_a_time(bf16, monkeypatch):
    monkeypatch.setattr(loop, "together_here", only(1))
    found = batch_size(bf16, None, 20, 100)
    assert found.size == 1 and found.text.startswith("1 row") and "the o map, 8 rows" in found.text
    with refused("--batch-size", "at most 1 here (the o map, 8 rows: other bits than alone), found 5"):
        batch_size(bf16, 5, 20, 100)
    assert batch_size(bf16, 1, 20, 100).size == 1


def test_caches_that_do_not_fit_are_refused_or_fewer(bf16, monkeypatch):
    config, longest = bf16.config, 100
    row = CACHES * 2 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * longest * 2
    monkeypatch.setattr(loop, "free_bytes", lambda device: 2 * row + 1)
    found = batch_size(bf16, None, 20, longest)
    assert found.size == min(2, together_here(bf16).size) and f"take up to {row} bytes" in found.text
    with refused("--batch-size", f"a row's caches take up to {row} bytes, and {2 * row + 1} are free", "found 3"):
        batch_size(bf16, 3, 20, longest)
    monkeypatch.setattr(loop, "free_bytes", lambda device: None)
    assert batch_size(bf16, None, 20, longest).size == together_here(bf16).size
    monkeypatch.undo()
    free = free_bytes(bf16.numeric.torch_device)
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_preflight_that_fails_leaves_the_ledger_of_one_row_at_a_time(study, tmp_path, monkeypatch):
    real = RetainedLive.argmax
    monkeypatch.setattr(RetainedLive, "argmax", gate(lambda self, made: made.index != 1 and real(self, made)))
    for size in (1, 3):
        done = run(study, "matrix", tmp_path / str(size), *BF16, "--preflight", 3, "--batch-size", size, expected=3)
        assert "preflight failed: row t001: argmax" in done.stdout
    assert len(ledger(tmp_path / "3")) == 2
    assert (tmp_path / "1/rows.jsonl").read_bytes() == (tmp_path / "3/rows.jsonl").read_bytes()


def test_rows_that_end_before_an_earlier_one_are_kept_when_the_run_is_interrupted(study, tmp_path, monkeypatch):
    """The first row takes so long that the others end before it; then the run is interrupted."""
    real = RetainedLive.row
    decoded = []

    def late(self, index, progress):
        decoded.append(index)
        row = yield from real(self, index, progress)
        if index == 0:  # again and again, so that this row ends last
            for _ in range(3):
                yield from real(self, index, progress)
            if decoded.count(0) == 1:
                raise KeyboardInterrupt
        return row

    monkeypatch.setattr(RetainedLive, "row", late)
    given = [part for part in inputs(study, "--out", tmp_path / "run", *BF16, "--preflight", 0) if part != "--quiet"]
    done = call("matrix", *given, "--batch-size", 3, cwd=study)
    assert done.exit_code == 130 and not (tmp_path / "run/rows.jsonl").exists()
    kept = [json.loads(line)["index"] for line in (tmp_path / "run/partial/rows-0.jsonl").read_text().splitlines()]
    assert kept and 0 not in kept
    again = call("matrix", *given, "--batch-size", 3, cwd=study)
    assert again.exit_code == 0 and f"{len(kept)} rows are already there and kept" in again.stderr
    assert all(decoded.count(index) == 1 for index in kept)
    assert (tmp_path / "run/rows.jsonl").read_bytes() == (study / "runs/matrix-bf16/rows.jsonl").read_bytes()
    assert not (tmp_path / "run/partial").exists()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_the_bytes_of_one_process_and_rank_0_alone_speaks(small, alone, tmp_path, size):
    out = tmp_path / "run"
    job = sharded(small, out, size)
    assert job.code == 0, job.stderr
    require_same(out, alone)
    assert job.stdout[0].startswith("matrix bf16: 9 rows, gates all passed") and f"on {size} ranks" in job.stderr[0]
    assert job.stdout[1:] == job.stderr[1:] == [""] * (size - 1)
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    order = manifest_of(out)["row_order"]
    # two phases, the preflight's two rows and the other seven, each dealt from rank 0 on
    ranks = [*(i % size for i in range(2)), *(i % size for i in range(7))]
    assert [(t["row"], t["rank"], t["world_size"]) for t in timing] == [(row, r, size) for row, r in zip(order, ranks)]


@pytest.mark.parametrize("sizes", [(3, 3), (8, 2)])
def test_each_rank_decodes_rows_together(small, alone, tmp_path, sizes):
    """Each its own number; rows may come to a partial ledger in another order, and rows.jsonl does not show it."""
    given = {rank: ["--batch-size", size] for rank, size in enumerate(sizes)}
    job = sharded(small, tmp_path / "run", 2, given=given)
    assert job.code == 0, job.stderr
    require_same(tmp_path / "run", alone)


def test_a_rank_that_computes_other_bits_moves_the_ledger(small, alone, tmp_path):
    """The control: the comparison sees one rank's rows."""

    def flip(rank):
        real = designs.live_steps

        def flipped(model, prompt, **options):
            with torch.inference_mode():
                model.norm[0] += 2**-6
            return real(model, prompt, **options)

        if rank == 1:
            designs.live_steps = flipped

    assert sharded(small, tmp_path / "run", 2, before=flip).code in (0, 3)
    mine, theirs = ((p / "rows.jsonl").read_bytes().splitlines() for p in (tmp_path / "run", alone))
    assert [a == b for a, b in zip(mine, theirs)] == [True, False, True, False, True, False, True, False, True]


def test_a_killed_rank_loses_nothing_and_any_number_of_ranks_goes_on(small, alone, tmp_path):
    """Three ranks, one killed; two, the leader killed; then one process: nothing that was written is decoded again."""
    out = tmp_path / "run"
    # how many rows each rank decodes before it waits or, the victim, dies; how many are on disk then
    for victim, rows, held in ((1, [2, 2, 1], 5), (0, [1, 1], 7)):

        def stop(rank, victim=victim, rows=rows, held=held):
            stop_after_rows(rows[rank], lambda: die_at(out, held) if rank == victim else signal.pause())

        job = sharded(small, out, len(rows), before=stop)
        assert job.code == job.codes[victim] == 128 + signal.SIGKILL
        assert [code for rank, code in enumerate(job.codes) if rank != victim] == [130] * (len(rows) - 1)
        assert job.errors()[0] == "interrupted" and len(job.errors()) == 2
        assert f"resume with: torchrun --nproc-per-node {len(rows)} -m experiments.matrix --dtype" in job.errors()[1]
        assert len(there(out)) == held
    ended = small.run(out, before=lambda: stop_after_rows(2, forbid))
    assert ended.code == 0 and "7 rows are already there and kept" in ended.stderr
    require_same(out, alone)


def test_ranks_go_on_where_one_process_stopped(small, alone, tmp_path):
    out = tmp_path / "run"
    ended = small.run(out, before=lambda: stop_after_rows(4))
    assert ended.code == 130 and len(there(out)) == 4
    job = sharded(small, out, 2)
    assert job.code == 0 and "4 rows are already there and kept" in job.stderr[0]
    require_same(out, alone)
    # a finished run is summed up again, decoding nothing; --fresh sets it aside
    assert sharded(small, out, 3, before=lambda rank: stop_after_rows(0, forbid)).code == 0
    require_same(out, alone)
    assert sharded(small, out, 2, "--fresh").code == 0
    require_same(out, alone)
    require_same(tmp_path / "run.1", alone)


def test_boundaries_and_traces_are_those_of_one_process(small, tmp_path):
    more = ["--save-boundaries", "--trace", "t001", "--trace", "t002", "--limit", 4]
    assert small.run(tmp_path / "single", *more).code == 0
    job = sharded(small, tmp_path / "run", 2, *more)
    assert job.code == 0 and "not written" not in "".join(job.stderr)
    trees = [
        {p.relative_to(root): p.read_bytes() for name in ("boundaries", "traces") for p in (root / name).iterdir()}
        for root in (tmp_path / "single", tmp_path / "run")
    ]
    assert len(trees[0]) == 2 * (4 + 2) and trees[0] == trees[1]


COMMANDS = {
    "fixed_prefix": [],
    "bridge": BF16,
    "transplant": BF16,
    "replication": BF16,
    "batch_control": BF16,
    "causes": [*BF16, "--rows", 3, "--cell", "repeat_kv/plain", "--cell", "blocked/tiled"],
    "carrier": [*BF16, "--rows", 3],
}
QUICK = ("fixed_prefix", "bridge")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in COMMANDS])
def test_every_experiment_writes_one_ledger_whatever_the_number_and_the_ranks(study, tmp_path, name):
    """Rows of several dtypes or cells, panels in another order, inputs kept beside the ledger."""
    tasks, checkpoint = name not in ("transplant", "replication", "carrier"), "primary"
    options = {"tasks": tasks, "checkpoint": "later" if name == "replication" else checkpoint}
    single, out = tmp_path / "1", tmp_path / "run"
    for size in (1, 3):
        run(study, name, tmp_path / str(size), *COMMANDS[name], "--batch-size", size, **options)
        assert (tmp_path / f"{size}/rows.jsonl").read_bytes() == (single / "rows.jsonl").read_bytes()

    def rank():
        arguments = list(map(str, inputs(study, "--out", out, *COMMANDS[name], **options)))
        os.chdir(study)
        sys.argv = [name, *arguments]
        command_module(f"experiments.{name}").main(args=arguments, prog_name=name)
        return CRASHED  # a command ends by sys.exit, always

    job = run_job([rank] * 2, tmp_path / "said")
    assert job.code == 0, job.stderr
    require_same(out, single)
    assert {json.loads(line)["rank"] for line in (out / "timing.jsonl").read_text().splitlines()} == {0, 1}
    assert {path.name for path in single.iterdir()} == {path.name for path in out.iterdir()}


@pytest.fixture(scope="module")
def stopped_job(small, tmp_path_factory):
    """The directory of a job of three ranks that has decoded t000 and t003, t001 and t004, t002 and t005.

    Then a rank is killed, and the others wait.
    """
    out = tmp_path_factory.mktemp("stopped") / "run"

    def stop(rank):
        stop_after_rows(2, signal.pause if rank else lambda: die_at(out, 6))

    assert sharded(small, out, 3, "--preflight", 0, before=stop).code == 137 and len(there(out)) == 6
    return out


@pytest.fixture
def stopped(stopped_job, tmp_path):
    """A copy of that directory, and the partial ledger of rank 1."""
    out = tmp_path / "run"
    shutil.copytree(stopped_job, out)
    return out, out / "partial/rows-1.jsonl"


def test_a_flipped_byte_in_a_partial_ledger_is_named_and_refused(small, alone, stopped):
    out, path = stopped
    good = path.read_bytes()
    first = good.index(b"\n")
    for place, line in ((30, 1), (first, 1), (first + 300, 2)):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        named = f"{path} line {line}: expected an intact row, found damage"
        one_error(small.run(out, "--preflight", 0), named)
        assert path.read_bytes() == damaged, "damage must not be touched"
    [error] = (job := sharded(small, out, 2, "--preflight", 0)).errors()
    assert job.code == 2 and named in error and path.read_bytes() == damaged
    path.write_bytes(good + good[:77])  # the control: a torn tail is no damage
    ended = small.run(out, "--preflight", 0)
    assert ended.code == 0 and "dropped torn last lines of 77 bytes" in ended.stderr
    require_same(out, alone)


def test_rows_of_another_run_and_rows_that_disagree_are_refused(small, alone, stopped):
    """All are sealed, so that no digest shows it."""
    out, path = stopped
    good = path.read_bytes()
    row = json.loads(good.splitlines()[0])
    bare = {key: value for key, value in row.items() if key != "row_sha256"}
    for change, message in (
        ({"row": "t777"}, "expected a row of this run's manifest"),
        ({"index": ROWS}, "expected a row of this run's manifest"),
        ({"index": row["index"] - ROWS}, "expected a row of this run's manifest"),
        ({"index": None}, "expected a row of this run's manifest"),
        ({"index": True}, "expected a row of this run's manifest"),
        ({"passed": False}, f"expected row {row['row']} as elsewhere in this run, found other bytes"),
    ):
        path.write_bytes(good + seal({**bare, **change}).encode() + b"\n")
        number = good.count(b"\n") + 1
        one_error(small.run(out, "--preflight", 0), f"{path} line {number}: {message}")
    path.write_bytes(good + good.splitlines(keepends=True)[0])  # the control: the same row twice
    assert small.run(out, "--preflight", 0).code == 0
    require_same(out, alone)


def test_a_rank_of_an_earlier_job_that_still_writes_is_seen(small, stopped):
    out, path = stopped
    handle = lock(path)
    try:
        for ended in (small.run(out, "--preflight", 0), small.run(out, "--preflight", 0, "--limit", ROWS)):
            one_error(ended, f"{path}: expected no other writer, found a process that holds its lock")
        assert sharded(small, out, 2, "--preflight", 0).code == 2
    finally:
        os.close(handle)
    assert small.run(out, "--preflight", 0).code == 0


def broken_gate(rank, where, after=0):
    """Lets a replica gate fail on one rank, from its row number `after` on."""
    real, left = experiment.replica_exact, iter(range(2 * after))
    if rank == where:
        experiment.replica_exact = lambda one, two: next(left, None) is not None and real(one, two)


def test_a_gate_that_fails_on_one_rank_ends_the_job_with_code_3(small, alone, tmp_path):
    out = tmp_path / "run"
    job = sharded(small, out, 2, before=lambda rank: broken_gate(rank, 1, after=1))
    assert job.code == job.codes[0] == 3 and job.errors() == []
    assert job.stdout[0].count("FAILED on 3 rows") == 1 and job.stdout[1] == ""
    assert summary_of(out)["failed_rows"] == ["t003", "t005", "t007"]


@pytest.mark.parametrize("where", [0, 1])
def test_a_preflight_that_fails_on_one_rank_stops_all_of_them(small, alone, tmp_path, where):
    """No rank decodes a row beyond the preflight; what is there is what one process leaves, and it stops again."""
    out, single = tmp_path / "run", tmp_path / "single"
    job = sharded(small, out, 2, before=lambda rank: broken_gate(rank, where))
    assert job.code == job.codes[0] == 3 and job.errors() == []
    assert job.stdout == [f"preflight failed: row t00{where}: replica_live, replica_prefill; the run in {out} stopped "
                          "before the remaining rows\n", ""]  # fmt: skip
    assert small.run(single, before=lambda: broken_gate(0, 0, after=where)).code == 3
    assert (out / "rows.jsonl").read_bytes() == (single / "rows.jsonl").read_bytes()
    assert there(out) == {"t000", "t001"} and not (out / "summary.json").exists()
    again = [small.run(out), sharded(small, out, 3)]
    assert [ended.code for ended in again] == [3, 3]


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_on_one_rank_is_one_line_and_code_2(small, alone, tmp_path, where):
    out, size = tmp_path / "run", len((alone / "rows.jsonl").read_bytes().splitlines()[0])
    limit = int(2.5 * size)
    job = sharded(small, out, 2, before=lambda rank: limit_file_size(limit) if rank == where else None)
    assert job.code == 2 == job.codes[where], job.stderr
    [line] = job.errors()
    assert f"{out}/" in line and "File too large" in line
    assert sharded(small, out, 2).code == 0
    require_same(out, alone)


def test_a_rank_under_another_contract_is_refused_by_name(small, tmp_path):
    """As on a machine whose processor or library differs from rank 0's."""
    job = sharded(small, tmp_path / "run", 2, given={1: ["--kernels", "packed_gqa"]})
    assert job.code == 2
    [line] = job.errors()
    assert (
        line.startswith("error: rank 1: ") and 'numeric[0].attention: expected "packed_gqa", found "repeat_kv"' in line
    )


def test_bad_input_that_every_rank_finds_is_one_line(small, tmp_path):
    job = sharded(small, tmp_path / "run", 3, "--tasks", "nowhere.jsonl")
    assert job.code == 2 and job.errors() == ["error: nowhere.jsonl: expected a file, found nothing"]
