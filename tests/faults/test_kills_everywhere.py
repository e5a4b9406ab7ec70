"""Every experiment is killed at random moments and ends in the bytes of its own undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.experiments.runs import command_module, inputs, write_study
from tests.faults.forked import CRASHED, Ended, in_child, send_at_call

ROOT = Path(__file__).resolve().parents[2]
KILLS = 4
EXPERIMENTS = {
    "fixed_prefix": (),
    "bridge": ("--dtype", "bf16"),
    "transplant": ("--dtype", "bf16"),
    "replication": ("--dtype", "bf16"),
    "batch_control": ("--dtype", "bf16"),
    "carrier": ("--dtype", "bf16"),
}
CAUSES = ("--dtype", "bf16", "--rows", 2)
NO_TASKS = ("transplant", "carrier", "replication")


@dataclass(frozen=True)
class Job:
    """One experiment over the small study."""

    study: Path
    name: str

    def run(self, out: Path, before: Callable[[], None] | None = None) -> Ended:
        """The command in a forked child whose working directory is the study; `before` runs in it first."""
        checkpoint = "later" if self.name == "replication" else "primary"
        given = inputs(self.study, *EXPERIMENTS[self.name], tasks=self.name not in NO_TASKS, checkpoint=checkpoint)
        arguments = [*map(str, given), "--out", str(out)]

        def body() -> int:
            os.chdir(self.study)
            sys.argv = [self.name, *arguments]
            if before is not None:
                before()
            command_module(f"experiments.{self.name}").main(args=arguments, prog_name=self.name)
            return CRASHED  # a command ends by sys.exit, always

        return in_child(body, out.parent)


@pytest.fixture(scope="module")
def small_study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("killed"))


def kill_once(job: Job, out: Path, calls: list[int], rng: random.Random) -> Ended:
    """SIGKILL somewhere between the first row's start and the last one's end, or the run's own end before that."""
    moment = rng.randrange(1, calls[-1] + 1)
    return job.run(out, lambda: send_at_call(signal.SIGKILL, moment))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_an_experiment_survives_kills(small_study, tmp_path, name):
    job, counts = Job(small_study, name), tmp_path / "calls.txt"
    ended = job.run(tmp_path / "undisturbed", lambda: send_at_call(0, -1, counts))
    assert ended.code == 0, ended.stderr
    calls, rng = [int(line) for line in counts.read_text().split()], random.Random(name)
    whole, kept, killed = (tmp_path / "undisturbed/rows.jsonl").read_bytes(), 0, 0
    out = tmp_path / "run"
    while killed < KILLS and kept < whole.count(b"\n"):
        ended = kill_once(job, out, calls, rng)
        assert ended.signal == signal.SIGKILL or ended.code == 0, ended.stderr
        killed += ended.signal == signal.SIGKILL
        data = (out / "rows.jsonl").read_bytes() if (out / "rows.jsonl").exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        assert whole.startswith(complete) and complete.count(b"\n") >= kept, "a line was lost or is another one"
        kept = complete.count(b"\n")
    assert killed, "never killed"
    ended = job.run(out)
    assert ended.code == 0, ended.stderr
    for file in ("rows.jsonl", "summary.json", "report.md"):
        assert (out / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes(), file


@pytest.mark.slow
def test_causes_survives_kills_by_the_clock(small_study, tmp_path):
    """A process of its own: its kernels are checked with several threads, which a forked child does not have."""
    given = [*map(str, inputs(small_study, *CAUSES))]
    start = [sys.executable, "-m", "experiments.causes", *given, "--out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(out, seconds):
        process = subprocess.Popen([*start, str(tmp_path / out)], cwd=small_study, env=environment)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    began = time.monotonic()
    assert run("undisturbed", None) == 0
    whole, rng = time.monotonic() - began, random.Random(3)
    killed = [run("run", rng.uniform(0.4, 0.9) * whole) == -signal.SIGKILL for _ in range(KILLS)]
    assert any(killed) and run("run", None) == 0
    for file in ("rows.jsonl", "summary.json", "report.md"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes(), file
