"""The row loop of every experiment: resume, preflight, decode, append, summarise; alone, or as one rank of several."""

from pathlib import Path

from experiments.harness import ranks
from experiments.harness.exits import DONE, GATE_FAILED, one_line, say
from experiments.harness.progress import Progress
from experiments.harness.rowloop import Plan, Row, decode_rows, preflight_failure
from experiments.harness.rundir import RunDirectory
from experiments.harness.sharding import follow, informing, lead, missing, phases, take_over, waiting_failure
from experiments.report.closing import withheld
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
    for line in plan.closing(summary) if summary["no_result"] is None else [withheld(summary)]:
        say(line)
    say(f"run: {out}")
    for line in plan.notes():
        say(line, err=True)
    return DONE if summary["passed"] else GATE_FAILED


def _run_rows(plan: Plan, directory: RunDirectory, progress: Progress) -> str:
    """Decodes the missing rows, the preflight first; returns a text, naming row and gates, when it failed."""
    stopped = take_over(plan, directory, 0) or waiting_failure(plan, directory)
    for rows in [] if stopped else phases(plan, missing(plan, directory)):
        stopped = stopped or _append_in_order(plan, directory, progress, rows)
    return stopped


def _append_in_order(plan: Plan, directory: RunDirectory, progress: Progress, rows: list[int]) -> str:
    """Decodes rows and writes each once all before it are there; those that wait for rows of a later phase are put
    aside. Returns a text when a row of the preflight failed."""
    done: dict[int, tuple[Row, Row]] = {}
    try:
        for index, row, timing in decode_rows(plan, rows, progress, informing(directory, progress)):
            done[index] = row, timing
            while directory.length in done:
                first = directory.length
                row, timing = done.pop(first)
                directory.append(row, timing)
                stopped = preflight_failure(plan, first, row) or take_over(plan, directory, directory.length)
                if stopped:
                    return stopped
        directory.put_aside([done.pop(index) for index in sorted(done)])
    finally:
        if done:
            progress.note(f"{len(done)} rows were done before an earlier one and are not written; they are redone")
    return waiting_failure(plan, directory)


__all__ = ["Plan", "run_plan"]
