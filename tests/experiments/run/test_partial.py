"""Partial ledgers that are damaged, foreign, at odds or still held: named by file and line, never touched."""

import json
import os
import signal
from pathlib import Path

from experiments.run.ledger import lock, seal
from tests.experiments.run.conftest import ROWS
from tests.experiments.run.sharded import die_at, sharded, stop_at_row, there
from tests.faults.conftest import Small
from tests.faults.test_disk import one_error


def stopped_job(small: Small, out: Path) -> list[Path]:
    """A job of three ranks that ends with two rows in each partial ledger: t000 and t003, t001 and t004, t002 and t005.

    Then a rank is killed, and the others wait.
    """

    def stop(rank: int) -> None:
        stop_at_row(2, signal.pause if rank else lambda: die_at(out, 6))

    assert sharded(small, out, 3, "--preflight", 0, before=stop).code == 137
    assert len(there(out)) == 6
    return sorted(out.glob("partial/rows-*.jsonl"))


def test_a_flipped_byte_in_a_partial_ledger_is_named_and_refused(small: Small, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = stopped_job(small, out)[1]
    good = path.read_bytes()
    first = good.index(b"\n")
    for place, line in ((30, 1), (first, 1), (first + 300, 2)):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        named = f"{path} line {line}: expected an intact row, found damage"
        one_error(small.run(out, "--preflight", 0), named)
        [error] = (job := sharded(small, out, 2, "--preflight", 0)).errors()
        assert job.code == 2 and named in error
        assert path.read_bytes() == damaged, "damage must not be touched"
    path.write_bytes(good + good[:77])  # the control: a torn tail is no damage
    ended = small.run(out, "--preflight", 0)
    assert ended.code == 0 and "dropped torn last lines of 77 bytes" in ended.stderr
    assert (out / "rows.jsonl").read_bytes() == (alone / "rows.jsonl").read_bytes()


def test_rows_of_another_run_and_rows_that_disagree_are_refused(small: Small, alone: Path, tmp_path: Path) -> None:
    """Both are sealed, so that no digest can tell."""
    out = tmp_path / "run"
    path = stopped_job(small, out)[1]
    good = path.read_bytes()
    row = json.loads(good.splitlines()[0])
    bare = {key: value for key, value in row.items() if key != "row_sha256"}
    for change, message in (
        ({"row": "t777"}, "expected a row of this run's manifest"),
        ({"index": ROWS}, "expected a row of this run's manifest"),
        ({"index": True}, "expected a row of this run's manifest"),
        ({"passed": False}, f"expected row {row['row']} as elsewhere in this run, found other bytes"),
    ):
        path.write_bytes(good + seal({**bare, **change}).encode() + b"\n")
        number = good.count(b"\n") + 1
        one_error(small.run(out, "--preflight", 0), f"{path} line {number}: {message}")
    path.write_bytes(good + good.splitlines(keepends=True)[0])  # the control: the same row twice
    assert small.run(out, "--preflight", 0).code == 0
    assert (out / "rows.jsonl").read_bytes() == (alone / "rows.jsonl").read_bytes()


def test_a_rank_of_an_earlier_job_that_still_writes_is_seen(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = stopped_job(small, out)[2]
    handle = lock(path)
    try:
        for refused in (small.run(out, "--preflight", 0), small.run(out, "--preflight", 0, "--limit", ROWS)):
            one_error(refused, f"{path}: expected no other writer, found a process that holds its lock")
        assert sharded(small, out, 2, "--preflight", 0).code == 2
    finally:
        os.close(handle)
    assert small.run(out, "--preflight", 0).code == 0
