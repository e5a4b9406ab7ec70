"""The row loop of every experiment: resume, preflight, decode, append, summarise."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from decode.greedy import RowFailure
from experiments.harness.exits import DONE, GATE_FAILED, one_line
from experiments.harness.progress import Progress
from experiments.harness.rows import failed_row
from experiments.harness.rundir import RunDirectory, row_key
from experiments.harness.tasks import RowName, Task


@dataclass(frozen=True)
class Plan:
    """One experiment, ready to run.

    decode(index, progress) gives row `index` of the manifest's row order; task(index) names it. gates: names a row
    carries even when it fails closed. summarise(rows) gives summary.json; report(manifest, summary) gives report.md;
    closing(summary) the lines for stdout. preflight: the first rows, or rows by index, that must pass before any later
    one is decoded. extra(index): fields that a row carries even when it fails closed. attachments: inputs kept beside
    the ledger, name to text, written before the first row.
    """

    manifest: dict[str, Any]
    preflight: int | frozenset[int]
    gates: tuple[str, ...]
    task: Callable[[int], Task | RowName]
    decode: Callable[[int, Progress], dict[str, Any]]
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]
    report: Callable[[dict[str, Any], dict[str, Any]], str]
    closing: Callable[[dict[str, Any]], list[str]]
    extra: Callable[[int], dict[str, Any]] = field(default=lambda index: {})
    attachments: dict[str, str] = field(default_factory=dict)


def run_plan(plan: Plan, out: Path, fresh: bool, quiet: bool) -> int:
    """Runs what is not there yet; returns the exit code: 0, or 3 when a gate failed in any row."""
    directory = RunDirectory(out, plan.manifest, fresh)
    try:
        for name, text in plan.attachments.items():
            directory.attach(name, text)
        progress = Progress(len(plan.manifest["row_order"]), len(directory.rows), quiet)
        if directory.dropped:
            progress.note(f"{out}/rows.jsonl: dropped a torn last line of {directory.dropped} bytes; its row is redone")
        if directory.rows:
            progress.note(f"{out}: {len(directory.rows)} rows are already there and kept")
        stopped = _run_rows(plan, directory, progress)
        progress.close()
        if stopped:
            click.echo(f"preflight failed: {one_line(stopped)}; the run in {out} stopped before the remaining rows")
            return GATE_FAILED
        summary = plan.summarise(directory.written())
        directory.finish(summary, plan.report(directory.manifest, summary))
        for line in plan.closing(summary):
            click.echo(line)
        click.echo(f"run: {out}")
        return DONE if summary["passed"] else GATE_FAILED
    finally:
        directory.close()


def _run_rows(plan: Plan, directory: RunDirectory, progress: Progress) -> str:
    """Decodes the missing rows in order; a text when the preflight failed, naming row and gates."""
    preflight = range(plan.preflight) if isinstance(plan.preflight, int) else plan.preflight
    for index in range(len(plan.manifest["row_order"])):
        if index < len(directory.rows):
            row = directory.rows[index]
        else:
            start = time.monotonic()
            progress.row(plan.task(index).id)
            row = _decode(plan, index, progress)
            progress.row_done()
            directory.append(
                row,
                {
                    "row": plan.manifest["row_order"][index],
                    "seconds": round(time.monotonic() - start, 4),
                    "arms": {arm: round(spent, 4) for arm, spent in progress.arms.items()},
                },
            )
        if index in preflight and not row["passed"]:
            failed = [gate for gate, passed in row["gates"].items() if not passed]
            return f"row {row_key(row)}: {row.get('failure') or ', '.join(failed)}"
    return ""


def _decode(plan: Plan, index: int, progress: Progress) -> dict[str, Any]:
    try:
        return plan.decode(index, progress)
    except RowFailure as failure:
        return failed_row(plan.task(index), index, list(plan.gates), str(failure), plan.extra(index))
