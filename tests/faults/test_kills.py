"""A run that dies at any moment, by SIGKILL or an interruption: what it wrote stays, and it ends in the same bytes."""

import itertools
import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import ROWS, Reference, Small, run_undisturbed, write_small
from tests.faults.forked import kill_after, send_at_call


def moment(rng: random.Random, reference: Reference, rows: int) -> int:
    """A call to die at: now and then while everything is opened, mostly within about two rows after it."""
    start, end = reference.calls[0], reference.calls[-1]
    if rng.random() < 0.2:
        return rng.randrange(1, start)
    return start + rng.randrange(1, 2 * (end - start) // rows)


def require_kept(out: Path, reference: Reference, before: int) -> int:
    """Complete lines are the undisturbed run's, none is lost; returns their number."""
    path = out / "rows.jsonl"
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    assert reference.rows.startswith(complete), "a line that is not the undisturbed run's"
    assert complete.count(b"\n") >= before, "a line was lost"
    return complete.count(b"\n")


def require_same_end(out: Path, reference: Reference) -> None:
    """Ledger, summary and report byte for byte; every line of timing.jsonl whole; no half-done file left."""
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (out / name).read_bytes() == (reference.directory / name).read_bytes(), name
    for line in (out / "timing.jsonl").read_text().splitlines():
        assert set(json.loads(line)) == {"row", "seconds", "arms"}
    assert not list(out.glob("*.part"))


def survive(small: Small, reference: Reference, out: Path, kills: int, rows: int, seed: int) -> list[int]:
    """Kills one run so many times, by count of calls and by the clock in turn; returns the rows there after each."""
    rng, kept = random.Random(seed), [0]
    for attempt in itertools.count():
        if len(kept) > kills:
            break
        assert attempt < 3 * kills + 10, "the run ends before it can be killed"
        at, after = moment(rng, reference, rows), None
        if attempt % 4 == 3:
            at, after = -1, kill_after(rng.uniform(0.01, 0.4))
        ended = small.run(out, before=lambda at=at: send_at_call(signal.SIGKILL, at), after=after)
        assert ended.signal == signal.SIGKILL or ended.code == 0, ended.stderr
        held = require_kept(out, reference, kept[-1])
        if ended.signal:
            kept.append(held)
    ended = small.run(out)
    assert ended.code == 0, ended.stderr
    require_same_end(out, reference)
    return kept[1:]


def test_a_run_survives_kills_at_random_moments(small, undisturbed, tmp_path):
    kept = survive(small, undisturbed, tmp_path / "run", kills=3, rows=ROWS, seed=1)
    assert len(kept) == 3


@pytest.mark.slow
def test_a_run_survives_fifty_kills(tmp_path):
    rows = 30
    small = write_small(tmp_path, rows)
    kept = survive(small, run_undisturbed(small), tmp_path / "run", kills=50, rows=rows, seed=2)
    assert len(kept) == 50 and len(set(kept)) > 10, kept
    print(f"\n50 kills survived, with so many rows there: {kept}")


@pytest.mark.parametrize(("size", "rows", "kills"), [(3, ROWS, 3), pytest.param(8, 24, 20, marks=pytest.mark.slow)])
def test_a_run_of_several_rows_together_survives_kills(small, undisturbed, tmp_path, size, rows, kills):
    """Killed with `size` rows in flight: the bytes of one row at a time, and no line that was there is lost."""
    if rows != ROWS:
        small = write_small(tmp_path, rows)
        undisturbed = run_undisturbed(small)
    rng, out, kept, killed = random.Random(size), tmp_path / "run", 0, 0
    start, end = undisturbed.calls[0], undisturbed.calls[-1]
    for _ in range(3 * kills + 10):
        if killed == kills:
            break
        at = start + rng.randrange(1, max(2, (end - start) // 2))
        ended = small.run(out, "--batch-size", size, before=lambda at=at: send_at_call(signal.SIGKILL, at))
        assert ended.signal == signal.SIGKILL or ended.code == 0, ended.stderr
        killed, kept = killed + bool(ended.signal), require_kept(out, undisturbed, kept)
    assert killed and (killed == kills or kept == rows)
    assert small.run(out, "--batch-size", size).code == 0
    require_same_end(out, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_at_any_moment_exits_130_and_names_the_command(small, undisturbed, tmp_path, number):
    rng, out = random.Random(number), tmp_path / "run"
    start, end = undisturbed.calls[0], undisturbed.calls[-1]
    at = start + rng.randrange(1, end - start)
    ended = small.run(out, "--fresh", before=lambda: send_at_call(number, at))
    assert ended.code == 130, (ended, at)
    lines = ended.stderr.strip().splitlines()
    assert lines[-2] == "interrupted" and lines[-1].startswith("resume with: python -m experiments.matrix --dtype bf16")
    assert "--fresh" not in lines[-1] and f"--out {out}" in lines[-1]
    require_kept(out, undisturbed, 0)
    rows = out / "rows.jsonl"
    assert not rows.exists() or rows.read_bytes()[-1:] in (b"", b"\n"), "a half line"
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


def test_an_interruption_inside_a_write_waits_for_the_whole_line(small, undisturbed, tmp_path):
    """The signal comes at the very fsync of a row; the row is there all the same."""

    def interrupt_at_fsync():
        real, calls = os.fsync, itertools.count()

        def fsync(handle):
            if next(calls) == 4:  # the manifest's two, the first row's and its timing's come before
                os.kill(os.getpid(), signal.SIGTERM)
            real(handle)

        os.fsync = fsync

    out = tmp_path / "run"
    ended = small.run(out, before=interrupt_at_fsync)
    assert ended.code == 130, ended
    assert require_kept(out, undisturbed, 0) == 2
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)
