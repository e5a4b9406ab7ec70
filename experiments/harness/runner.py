"""The row loop of every experiment: resume, preflight, decode, append, summarise; alone, or as one rank of several."""

from pathlib import Path

from experiments.harness import ranks
from experiments.harness.exits import DONE, GATE_FAILED, one_line, say
from experiments.harness.progress import Progress
from experiments.harness.rowloop import Plan, decode_row, preflight_failure
from experiments.harness.rundir import RunDirectory
from experiments.harness.sharding import follow, lead
from experiments.report.sections import run_report


def run_plan(plan: Plan, out: Path, fresh: bool, quiet: bool) -> int:
    """Runs what is not there yet; returns the exit code: 0, or 3 when a gate failed in any row.

    Under torchrun every rank decodes its share; rank 0 alone holds the directory, sums up and returns the verdict, and
    the others return 0 once it has.
    """
    job = ranks.current()
    if job is not None and job.rank > 0:
        return follow(plan, out, job)
    directory = RunDirectory(out, plan.manifest, fresh)
    try:
        code = _run(plan, directory, job, quiet)
    finally:
        directory.close()
    if job is not None:
        job.tell(ranks.END)
    return code


def _run(plan: Plan, directory: RunDirectory, job: ranks.Ranks | None, quiet: bool) -> int:
    out = directory.path
    for name, text in plan.attachments.items():
        directory.attach(name, text)
    held = directory.length + len(directory.waiting)
    progress = Progress(plan.total, held, quiet, 1 if job is None else job.world_size)
    if directory.dropped:
        progress.note(f"{out}/rows.jsonl: dropped a torn last line of {directory.dropped} bytes; its row is redone")
    if directory.dropped_waiting:
        progress.note(f"{out}/partial: dropped torn last lines of {directory.dropped_waiting} bytes; redone")
    if held:
        progress.note(f"{out}: {held} rows are already there and kept")
    stopped = _run_rows(plan, directory, progress) if job is None else lead(plan, directory, progress, job)
    progress.close()
    if stopped:
        say(f"preflight failed: {one_line(stopped)}; the run in {out} stopped before the remaining rows")
        return GATE_FAILED
    summary = plan.summarise(directory.written())
    directory.finish(summary, run_report(directory.manifest, summary))
    for line in plan.closing(summary):
        say(line)
    say(f"run: {out}")
    for line in plan.notes():
        say(line, err=True)
    return DONE if summary["passed"] else GATE_FAILED


def _run_rows(plan: Plan, directory: RunDirectory, progress: Progress) -> str:
    """Decodes the missing rows in order; a text when the preflight failed, naming row and gates."""
    for index in range(plan.total):
        row = directory.take(index)
        if row is None:
            row, timing = decode_row(plan, index, progress)
            directory.append(row, timing)
        if stopped := preflight_failure(plan, index, row):
            return stopped
    return ""


__all__ = ["Plan", "run_plan"]
