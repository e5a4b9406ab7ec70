"""The whole study in order: every experiment of the paper, what goes beyond it, and the report.

Each step runs `python -m experiments.NAME` in a process, which has its own peak of memory and its own settings of the
numeric libraries. Every step resumes, so the same study again keeps finished rows. After a step that fails no other
starts, and the study ends with its exit code. Runs go to ROOT/NAME-DTYPE, the report to ROOT/report. The last lines are
the wall time of each step and the report's path.

    python -m experiments.study
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from experiments.run import options
from experiments.run.directory import SUMMARY
from experiments.run.exits import BAD_INPUT, INTERRUPTED, as_command
from minimodel.checkpoint import open_checkpoint
from minimodel.files import read_json_object
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable

GRACE = 60.0  # seconds an interrupted step has to finish its record
POLL_SECONDS = 0.1
NUMERIC = ("device", "threads", "kernels", "attention", "linear")
MATRIX, FIXED, AUDIT = "matrix-bf16", "fixed_prefix-bf16-fp32", "audit-matrix-fixed_prefix"


@dataclass(frozen=True)
class Step:
    """One command: `python -m experiments.NAME ARGUMENTS`."""

    name: str
    out: Path  # its run directory
    arguments: tuple[Any, ...]

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"experiments.{self.name}", *map(str, self.arguments)]


def study_steps(root: Path, later: Path, limit: int | None, given: dict[str, Any]) -> list[Step]:
    """Returns all steps but the report, in order. given: the options that are passed to the steps.

    limit: rows of the matrix and the batch control; the other steps take the matrix's rows.
    """
    passed = [name for name in (*NUMERIC, "batch_size") if given[name]]
    common = [f"--{name.replace('_', '-')}={given[name]}" for name in passed]
    common += [] if given["reduced_precision"] else ["--no-reduced-precision"]
    common += ["--quiet"] if given["quiet"] else []

    def step(name: str, out: str, *arguments: Any, checkpoint: Path = given["checkpoint"]) -> Step:
        return Step(name, root / out, (*arguments, "--out", root / out, "--checkpoint", checkpoint, *common))

    rows = () if limit is None else ("--limit", limit)
    bf16, tasks = ("--dtype", "bf16"), ("--tasks", given["tasks"])
    bank, strata = ("--source", root / MATRIX), ("--source", root / FIXED)
    return [
        step("matrix", MATRIX, *bf16, *tasks, *rows),
        step("matrix", "matrix-fp32", "--dtype", "fp32", *tasks, *rows),
        step("fixed_prefix", FIXED, *bank, *tasks),
        step("bridge", "bridge-bf16", *bf16, *bank, *tasks),
        Step("audit", root / AUDIT, (root / MATRIX, root / FIXED, "--out", root / AUDIT)),
        step("transplant", "transplant-bf16", *bf16, *strata),
        step("replication", "replication-bf16", *bf16, *bank, checkpoint=later),
        step("batch_control", "batch_control-bf16", *bf16, *tasks, *rows),
        step("causes", "causes", *bank, *tasks),
        step("carrier", "carrier-bf16", *bf16, *strata),
    ]


def run_study(root: Path, steps: Sequence[Step], quiet: bool, jobs: int = 1) -> int:
    """Runs the steps, up to `jobs` at once, and the report. Returns 0, or the code of the first step that failed."""
    seconds: dict[Path, float] = {}
    report = root / "report"
    try:
        code = run_steps(steps, quiet, jobs, seconds)
        ran = [step.out for step in steps if step.out in seconds]
        return code or run_steps([Step("report", report, (*ran, "--out", report))], quiet, 1, seconds)
    finally:
        for out, spent in seconds.items():
            click.echo(f"{spent:9.1f} s  {out.name}")
        if report in seconds:
            click.echo(f"report: {report / 'report.html'}")


def run_steps(steps: Sequence[Step], quiet: bool, jobs: int, seconds: dict[Path, float]) -> int:
    """Runs the steps, up to `jobs` at once. Returns 0, or the code of the first that failed, after which none starts.

    A step starts when those whose run directories are among its arguments have ended. seconds: gets the wall time of
    each that ran, by run directory. An interruption is passed on, waited for, and raised.
    """
    left, running, failed = list(steps), dict[Path, tuple[subprocess.Popen[bytes], float]](), 0

    def ended(out: Path) -> int:
        process, started = running.pop(out)
        seconds[out] = time.monotonic() - started
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    try:
        while running or (left and not failed):
            unfinished = {*running, *(step.out for step in left)}
            due = [step for step in left if unfinished & {*step.arguments} <= {step.out}] if not failed else []
            for step in due[: jobs - len(running)]:
                left.remove(step)
                if not without_rows(step):
                    if sys.stderr.isatty() or not quiet:
                        click.echo(f"== {step.out.name}", err=True)
                    running[step.out] = subprocess.Popen(step.command()), time.monotonic()
            time.sleep(POLL_SECONDS)
            for out in [out for out, (process, _) in running.items() if process.poll() is not None]:
                if (code := ended(out)) == INTERRUPTED:
                    raise KeyboardInterrupt
                failed = failed or report_failure(out.name, code)
    except BaseException:
        for process, _ in running.values():
            process.terminate()  # a terminal interrupts the steps as well; a second signal is harmless
        for out, (process, _) in list(running.items()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            process.wait()
            ended(out)
        raise
    return failed


def without_rows(step: Step) -> bool:
    """Whether a step would have no row: a carrier without a trajectory to move. Prints that it is left out."""
    if step.name != "carrier":
        return False
    rates = read_json_object(step.out.parent / FIXED / SUMMARY)["precisions"]["bf16"]
    if rates["suffix_disagreement"]["count"]:
        return False
    click.echo("carrier: left out, no row of the fixed_prefix run diverges")
    return True


def report_failure(title: str, code: int) -> int:
    """Returns a step's code, and prints which step failed where it is not 0."""
    if code:
        click.echo(f"the study stopped: {title} ended with code {code}", err=True)
    if code == BAD_INPUT:
        click.echo("(where the run there was made under other options, give the study another --out)", err=True)
    return code


OPTIONS: list[options.Decorator] = [
    click.option("--out", "root", type=options.PATH, default=Path("runs"), show_default=True,
                 metavar="ROOT", help="Parent of all runs."),
    options.checkpoint_option(),
    click.option("--later", type=options.PATH, default=options.DEMO / "later", metavar="DIR",
                 show_default="the bundled demo's", help="The checkpoint of the replication."),
    options.TASKS,
    options.LIMIT,
    click.option("--skip", "skipped", multiple=True, type=click.Choice(["causes", "carrier"]),
                 help="Leave a step out."),
    click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="N",
                 help="Steps that run at once, on the same cores: the same rows in less time, as most steps leave a "
                 "part of the cores idle. Times in the report are then those of a shared machine."),
    *options.NUMERIC,
    options.BATCH_SIZE,
    options.QUIET,
]  # fmt: skip


@click.command(help=__doc__)
@partial(options.with_options, options=OPTIONS)
@as_command("experiments.study", resumes=True)
def main(root: Path, later: Path, limit: int | None, skipped: tuple[str, ...], jobs: int, **given: Any) -> int:
    config = open_checkpoint(given["checkpoint"]).config
    numeric = {name: given[name] for name in (*NUMERIC, "reduced_precision")}
    for dtype in ("bf16", "fp32"):  # here, so that every step runs in one environment
        require_usable(NumericContract(dtype, **numeric), config)
    # the progress of several steps at once, on one terminal, could not be read
    steps = study_steps(root, later, limit, {**given, "quiet": given["quiet"] or jobs > 1})
    return run_study(root, [step for step in steps if step.name not in skipped], given["quiet"], jobs)


if __name__ == "__main__":
    main()
