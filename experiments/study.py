"""The whole study in order: every experiment of the paper, what goes beyond it, and the report.

Each step runs `python -m experiments.NAME` in a process, which has its own peak of memory and its own settings of the
numeric libraries. Every step resumes, so the same study again keeps finished rows. The first step that fails ends the
study with its exit code. Runs go to ROOT/NAME-DTYPE, the report to ROOT/report. The last lines are the wall time of
each step and the report's path.

    python -m experiments.study
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from experiments.run.directory import SUMMARY
from experiments.run.exits import BAD_INPUT, DONE, INTERRUPTED, run_command
from experiments.run.options import BATCH_SIZE, DEMO, numeric_options
from minimodel.checkpoint import open_checkpoint
from minimodel.files import read_json_object
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable

GRACE = 60.0  # seconds an interrupted step has to finish its record


@dataclass(frozen=True)
class StudyOptions:
    """The options that are passed to the steps."""

    root: Path
    primary: Path
    later: Path
    tasks: Path
    limit: int | None  # rows of the matrix and the batch control; the other steps take the matrix's rows
    numeric: tuple[str, ...]
    quiet: bool


@dataclass(frozen=True)
class Step:
    """One command: `python -m experiments.NAME ARGUMENTS`."""

    name: str
    out: Path  # its run directory
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.out.name

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"experiments.{self.name}", *self.arguments]


def study_steps(options: StudyOptions) -> list[Step]:
    """Returns all steps but the report, in order."""
    root, tasks = options.root, ("--tasks", str(options.tasks))
    matrix, fixed = root / "matrix-bf16", root / "fixed_prefix-bf16-fp32"
    limit = () if options.limit is None else ("--limit", str(options.limit))

    def step(name: str, out: str, *arguments: str, checkpoint: Path = options.primary) -> Step:
        common = ("--checkpoint", str(checkpoint), *options.numeric, *(("--quiet",) if options.quiet else ()))
        return Step(name, root / out, (*arguments, "--out", str(root / out), *common))

    bank, strata = ("--source", str(matrix)), ("--source", str(fixed))
    steps = [
        step("matrix", "matrix-bf16", "--dtype", "bf16", *tasks, *limit),
        step("matrix", "matrix-fp32", "--dtype", "fp32", *tasks, *limit),
        step("fixed_prefix", fixed.name, *bank, *tasks),
        step("bridge", "bridge-bf16", "--dtype", "bf16", *bank, *tasks),
        Step(
            "audit",
            root / "audit-matrix-fixed_prefix",
            (str(matrix), str(fixed), "--out", str(root / "audit-matrix-fixed_prefix")),
        ),
        step("transplant", "transplant-bf16", "--dtype", "bf16", *strata),
        step("replication", "replication-bf16", "--dtype", "bf16", *bank, checkpoint=options.later),
        step("batch_control", "batch_control-bf16", "--dtype", "bf16", *tasks, *limit),
        step("causes", "causes", *bank, *tasks),
        step("carrier", "carrier-bf16", "--dtype", "bf16", *strata),
    ]
    return steps


def report_step(root: Path, runs: Sequence[Step]) -> Step:
    """Returns the report of the steps that ran."""
    return Step("report", root / "report", (*(str(step.out) for step in runs), "--out", str(root / "report")))


def nothing_to_carry(fixed: Path) -> bool:
    """Whether no BF16 row of the fixed_prefix run diverges: partial transplants then have no trajectory to move."""
    summary = read_json_object(fixed / SUMMARY)
    return bool(summary["precisions"]["bf16"]["suffix_disagreement"]["count"] == 0)


def run_step(step: Step) -> int:
    """Runs one step to its end and returns its exit code. An interruption is passed on, waited for, and raised."""
    process = subprocess.Popen(step.command())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # a terminal interrupts the step as well; a second signal is harmless
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if code >= 0 else 128 - code


def run_study(options: StudyOptions, skipped: Sequence[str]) -> int:
    """Runs all steps. Returns 0, or the code of the first step that failed."""
    ran: list[Step] = []
    times: list[tuple[str, float]] = []
    try:
        for step in study_steps(options):
            if step.name in skipped:
                continue
            if step.name == "carrier" and nothing_to_carry(options.root / "fixed_prefix-bf16-fp32"):
                click.echo("carrier: left out, no row of the fixed_prefix run diverges")
                continue
            code = _timed(step, times)
            if code != DONE:
                return _stopped(step, code)
            ran.append(step)
        report = report_step(options.root, ran)
        code = _timed(report, times)
        return DONE if code == DONE else _stopped(report, code)
    finally:
        for title, seconds in times:
            click.echo(f"{seconds:9.1f} s  {title}")
        if times and times[-1][0] == "report":
            click.echo(f"report: {options.root / 'report' / 'report.html'}")


def _timed(step: Step, times: list[tuple[str, float]]) -> int:
    if sys.stderr.isatty() or "--quiet" not in step.arguments:
        click.echo(f"== {step.title}", err=True)
    started = time.monotonic()
    try:
        return run_step(step)
    finally:
        times.append((step.title, time.monotonic() - started))


def _stopped(step: Step, code: int) -> int:
    click.echo(f"the study stopped: {step.title} ended with code {code}", err=True)
    if code == BAD_INPUT:
        click.echo("(where the run there was made under other options, give the study another --out)", err=True)
    return code


DIRECTORY = click.Path(path_type=Path)


@click.command(help=__doc__)
@click.option(
    "--out",
    "root",
    type=DIRECTORY,
    default=Path("runs"),
    show_default=True,
    metavar="ROOT",
    help="Parent of all runs.",
)
@click.option(
    "--checkpoint",
    type=DIRECTORY,
    default=DEMO / "primary",
    show_default="the bundled demo's",
    metavar="DIR",
    help="The checkpoint of all experiments but the replication.",
)
@click.option("--later", type=DIRECTORY, default=DEMO / "later", show_default="the bundled demo's", metavar="DIR",
              help="The checkpoint of the replication.")  # fmt: skip
@click.option(
    "--tasks",
    type=DIRECTORY,
    default=DEMO / "tasks.jsonl",
    show_default="the bundled demo's",
    metavar="FILE",
    help="JSON lines: id, question, choices, answer.",
)
@click.option("--limit", type=click.IntRange(min=1), default=None, metavar="N", help="Only the first N rows.")
@click.option("--skip", "skipped", multiple=True, type=click.Choice(["causes", "carrier"]), help="Leave a step out.")
@numeric_options
@BATCH_SIZE
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def main(
    root: Path, checkpoint: Path, later: Path, tasks: Path, limit: int | None, skipped: tuple[str, ...],
    device: str, threads: int, kernels: str, attention: str, linear: str,
    reduced_precision: bool, batch_size: int | None, quiet: bool,
) -> None:  # fmt: skip
    numeric = ["--device", device, "--threads", str(threads), "--kernels", kernels]
    numeric += ["--attention", attention] if attention else []
    numeric += ["--linear", linear] if linear else []
    numeric += [] if reduced_precision else ["--no-reduced-precision"]
    numeric += [] if batch_size is None else ["--batch-size", str(batch_size)]
    options = StudyOptions(root, checkpoint, later, tasks, limit, tuple(numeric), quiet)

    def body() -> int:
        config = open_checkpoint(checkpoint).config
        for dtype in ("bf16", "fp32"):  # here, so that every step runs in one environment
            one = NumericContract(dtype, device, kernels, attention, linear, threads, reduced_precision)
            require_usable(one, config)
        return run_study(options, skipped)

    run_command(body, "experiments.study")


if __name__ == "__main__":
    main()
