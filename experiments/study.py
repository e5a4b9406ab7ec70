"""The whole study in order: every experiment of the paper, what goes beyond it, and the report.

Each step runs `python -m experiments.NAME` in a process, which has its own peak of memory and its own settings of the
numeric libraries. Every step resumes, so the same study again keeps finished rows. The first step that fails ends the
study with its exit code. Runs go to ROOT/NAME-DTYPE, the report to ROOT/report. The last lines are the wall time of
each step and the report's path.

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


def run_step(step: Step) -> int:
    """Runs one step to its end and returns its exit code. An interruption is passed on, waited for, and raised."""
    with subprocess.Popen(step.command()) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # a terminal interrupts the step as well; a second signal is harmless
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if code >= 0 else 128 - code


def run_study(root: Path, steps: Sequence[Step], quiet: bool) -> int:
    """Runs the steps and the report. Returns 0, or the code of the first step that failed."""
    ran: list[Step] = []
    times: list[tuple[str, float]] = []

    def timed(step: Step) -> int:
        if sys.stderr.isatty() or not quiet:
            click.echo(f"== {step.out.name}", err=True)
        started = time.monotonic()
        try:
            code = run_step(step)
        finally:
            times.append((step.out.name, time.monotonic() - started))
        if code:
            click.echo(f"the study stopped: {step.out.name} ended with code {code}", err=True)
        if code == BAD_INPUT:
            click.echo("(where the run there was made under other options, give the study another --out)", err=True)
        return code

    try:
        for step in steps:
            if step.name == "carrier":
                rates = read_json_object(root / FIXED / SUMMARY)["precisions"]["bf16"]
                if rates["suffix_disagreement"]["count"] == 0:  # then there is no trajectory to move
                    click.echo("carrier: left out, no row of the fixed_prefix run diverges")
                    continue
            if code := timed(step):
                return code
            ran.append(step)
        return timed(Step("report", root / "report", (*(step.out for step in ran), "--out", root / "report")))
    finally:
        for title, seconds in times:
            click.echo(f"{seconds:9.1f} s  {title}")
        if times and times[-1][0] == "report":
            click.echo(f"report: {root / 'report' / 'report.html'}")


OPTIONS: list[options.Decorator] = [
    click.option("--out", "root", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
                 metavar="ROOT", help="Parent of all runs."),
    options.checkpoint_option(),
    click.option("--later", type=click.Path(path_type=Path), default=options.DEMO / "later", metavar="DIR",
                 show_default="the bundled demo's", help="The checkpoint of the replication."),
    options.TASKS,
    options.LIMIT,
    click.option("--skip", "skipped", multiple=True, type=click.Choice(["causes", "carrier"]),
                 help="Leave a step out."),
    *options.NUMERIC,
    options.BATCH_SIZE,
    options.QUIET,
]  # fmt: skip


@click.command(help=__doc__)
@partial(options.with_options, options=OPTIONS)
@as_command("experiments.study", resumes=True)
def main(root: Path, later: Path, limit: int | None, skipped: tuple[str, ...], **given: Any) -> int:
    config = open_checkpoint(given["checkpoint"]).config
    numeric = {name: given[name] for name in (*NUMERIC, "reduced_precision")}
    for dtype in ("bf16", "fp32"):  # here, so that every step runs in one environment
        require_usable(NumericContract(dtype, **numeric), config)
    steps = study_steps(root, later, limit, given)
    return run_study(root, [step for step in steps if step.name not in skipped], given["quiet"])


if __name__ == "__main__":
    main()
