"""A run that dies at any moment, by SIGKILL or an interruption: what it wrote stays, and it ends in the same bytes."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.experiments.commands import environment
from tests.experiments.runs import command_module, inputs, write_study
from tests.faults.conftest import ROWS, Reference, run_undisturbed, write_small
from tests.faults.forked import command, in_child, kill_after, send_at_call


def require_kept(out, reference, before):
    """Complete lines are the undisturbed run's, none is lost; returns their number."""
    path = out / "rows.jsonl"
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    assert reference.rows.startswith(complete), "a line that is not the undisturbed run's"
    assert complete.count(b"\n") >= before, "a line was lost"
    return complete.count(b"\n")


def require_same_end(out, reference):
    """Ledger, summary and report byte for byte; every line of timing.jsonl whole; no half-done file left."""
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (out / name).read_bytes() == (reference.directory / name).read_bytes(), name
    for line in (out / "timing.jsonl").read_text().splitlines():
        assert {"row", "seconds"} <= set(json.loads(line))
    assert not list(out.glob("*.part"))


def survive(run, reference, out, kills, moment):
    """Kills a run so many times, each at another `moment()`: a number of calls, or seconds where it is a float.

    `run(before, after)` starts or resumes it. Returns the rows there after each kill; fewer kills where it ended first.
    """
    kept = [0]
    for _ in range(3 * kills + 10):
        at = moment()
        if isinstance(at, float):
            ended = run(None, kill_after(at))
        else:
            ended = run(lambda at=at: send_at_call(signal.SIGKILL, at), None)
        assert ended.signal == signal.SIGKILL or ended.code == 0, ended.stderr
        held = require_kept(out, reference, kept[-1])
        kept += [held] if ended.signal else []
        if len(kept) > kills:
            break
    ended = run(None, None)
    assert ended.code == 0, ended.stderr
    require_same_end(out, reference)
    return kept[1:]


def moments(reference, seed, rows):
    """Calls to die at: one in five while all is opened, the rest within two rows after it; each 4th is in seconds."""
    rng, start, end = random.Random(seed), reference.calls[0], reference.calls[-1]
    for count in itertools.count(1):
        if count % 4 == 0:
            yield rng.uniform(0.01, 0.4)
        else:
            yield rng.randrange(1, start) if rng.random() < 0.2 else start + rng.randrange(1, 2 * (end - start) // rows)


SLOW = [pytest.param(*given, marks=pytest.mark.slow) for given in ((1, 30, 50), (8, 24, 20))]


@pytest.mark.parametrize(("together", "rows", "kills"), [(1, ROWS, 3), (3, ROWS, 3), *SLOW])
def test_a_run_survives_kills_at_random_moments(small, undisturbed, tmp_path, rows, kills, together):
    """One row at a time, and with several in flight."""
    if rows != ROWS:
        small = write_small(tmp_path, rows)
        undisturbed = run_undisturbed(small)
    out, more = tmp_path / "run", ("--batch-size", together)
    moment = moments(undisturbed, together, rows).__next__
    kept = survive(lambda *when: small.run(out, *more, before=when[0], after=when[1]), undisturbed, out, kills, moment)
    assert len(kept) == kills or (kept and together > 1), kept
    assert together > 1 or rows == ROWS or len(set(kept)) > 10, kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_at_any_moment_exits_130_and_names_the_command(small, undisturbed, tmp_path, number):
    rng, out = random.Random(number), tmp_path / "run"
    start, end = undisturbed.calls[0], undisturbed.calls[-1]
    at = start + rng.randrange(1, end - start)
    # earlier where it came too late: what this process has cached since the calls were counted, a child need not call
    tries = (partial(send_at_call, number, moment) for moment in range(at, 0, -(end - start) // 4))
    ended = next(found for moment in tries if (found := small.run(out, "--fresh", before=moment)).code != 0)
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


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed_prefix", "bridge", "transplant", "replication", "batch_control", "carrier"])
def test_every_experiment_survives_kills(study, tmp_path, name):
    more = () if name == "fixed_prefix" else ("--dtype", "bf16")
    checkpoint, no_tasks = ("later" if name == "replication" else "primary"), ("transplant", "carrier", "replication")
    given = inputs(study, *more, tasks=name not in no_tasks, checkpoint=checkpoint)

    def run(out, before=None, after=None):
        main = command_module(f"experiments.{name}").main
        starting = lambda: (os.chdir(study), before and before())  # noqa: E731
        return in_child(command(main, name, [*given, "--out", out], starting), tmp_path, after)

    counts = tmp_path / "calls.txt"
    ended = run(tmp_path / "undisturbed", lambda: send_at_call(0, -1, counts))
    assert ended.code == 0, ended.stderr
    reference = Reference(tmp_path / "undisturbed", [int(line) for line in counts.read_text().split()])
    rng, out = random.Random(name), tmp_path / "run"
    moment = lambda: rng.randrange(1, reference.calls[-1] + 1)  # noqa: E731
    assert survive(lambda *when: run(out, *when), reference, out, 4, moment), "never killed"


@pytest.mark.slow
def test_causes_survives_kills_by_the_clock(study, tmp_path):
    """In its own process: its kernels are checked with several threads, which a forked child does not have."""
    given = ["experiments.causes", *map(str, inputs(study, "--dtype", "bf16", "--rows", 2)), "--out"]

    def run(out, seconds=None):
        command = [sys.executable, "-m", *given, str(tmp_path / out)]
        process = subprocess.Popen(command, cwd=study, env=environment())
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    began = time.monotonic()
    assert run("undisturbed") == 0
    whole, rng = time.monotonic() - began, random.Random(3)
    killed = [run("run", rng.uniform(0.4, 0.9) * whole) == -signal.SIGKILL for _ in range(4)]
    assert any(killed) and run("run") == 0
    require_same_end(tmp_path / "run", Reference(tmp_path / "undisturbed", []))
