"""Rows of one run shared out over ranks, to the bytes that a single process writes.

Rank 0 holds the run directory. It first takes over whatever earlier jobs left in partial ledgers, then tells which rows
are left. These go in two phases: the preflight, wherever its rows stand, and then the others. Within a phase the
n-th row left goes to rank n modulo the number of ranks, which appends it to a partial ledger of its own. After each
phase rank 0 moves rows from there to `rows.jsonl` in source order, checks the preflight, and lets the others go on.
"""

import json
from pathlib import Path

from experiments.harness.exits import DONE
from experiments.harness.partial import PartialLedger
from experiments.harness.progress import Progress
from experiments.harness.ranks import END, Ranks
from experiments.harness.rowloop import Inform, Plan, decode_rows, preflight_failure
from experiments.harness.rundir import RunDirectory, require_same_manifest
from minimodel.errors import InputError

OPENED, GO, STOP = "opened", "go", "stop"


def lead(plan: Plan, directory: RunDirectory, progress: Progress, job: Ranks) -> str:
    """Rank 0's part; a text, naming row and gates, when the preflight failed."""
    stopped = take_over(plan, directory, 0) or waiting_failure(plan, directory)
    left = [] if stopped else missing(plan, directory)
    job.tell(OPENED, json.dumps(left))
    for stage, rows in enumerate(phases(plan, left)):
        decode_share(plan, rows, directory.path, progress, job, informing(directory, progress))
        for other in range(1, job.world_size):
            job.hear(_done(stage, other), lambda: progress.counted(job.rows_counted()))
        progress.counted(job.rows_counted())
        directory.look_again()
        stopped = take_over(plan, directory, directory.length) or waiting_failure(plan, directory)
        job.tell(_verdict(stage), STOP if stopped else GO)
        if stopped:
            return stopped
    assert stopped or directory.length == plan.total, "every phase is done and rows are missing"
    return stopped


def follow(plan: Plan, out: Path, job: Ranks) -> int:
    """Any other rank's part: its share of every phase, then in silence until rank 0 has summed up."""
    left = json.loads(job.hear(OPENED))
    try:
        require_same_manifest(plan.manifest, out)
    except InputError as error:
        raise InputError(f"rank {job.rank}: {error}") from None
    progress = Progress(plan.total, 0, quiet=True)
    for stage, rows in enumerate(phases(plan, left)):
        decode_share(plan, rows, out, progress, job, lambda part, text: None)
        job.tell(_done(stage, job.rank))
        if job.hear(_verdict(stage)) == STOP:
            break
    job.hear(END)
    return DONE


def decode_share(plan: Plan, rows: list[int], out: Path, progress: Progress, job: Ranks, inform: Inform) -> None:
    """Decodes this rank's rows of a phase. RankFailed when another rank has failed meanwhile: what is written stays."""
    ledger = PartialLedger(out, job.rank)
    try:
        job.check()
        for _, row, timing in decode_rows(plan, rows[job.rank :: job.world_size], progress, inform):
            ledger.append(row, {**timing, "rank": job.rank, "world_size": job.world_size})
            job.count_row()
            progress.counted(job.rows_counted())
            job.check()
    finally:
        ledger.close()


def informing(directory: RunDirectory, progress: Progress) -> Inform:
    """Writes to stderr and into the manifest's information how many rows are decoded together, and why."""

    def inform(part: str, text: str) -> None:
        if directory.inform("batch", part or "all rows", text):
            progress.note(f"{part}: {text}" if part else text)

    return inform


def missing(plan: Plan, directory: RunDirectory) -> list[int]:
    """The rows that neither the ledger nor a partial ledger holds."""
    return [index for index in range(directory.length, plan.total) if index not in directory.waiting]


def take_over(plan: Plan, directory: RunDirectory, start: int) -> str:
    """Moves rows from `start` on into `rows.jsonl` until one is missing; a text at a failed row of the preflight."""
    for index in range(start, plan.total):
        row = directory.take(index)
        if row is None:
            break
        if stopped := preflight_failure(plan, index, row):
            return stopped
    return ""


def waiting_failure(plan: Plan, directory: RunDirectory) -> str:
    """Returns a text when a preflight row failed that still waits in a partial ledger for the rows before it."""
    for index, line in sorted(directory.waiting.items()):
        if plan.is_preflight(index) and (stopped := preflight_failure(plan, index, line.read()[1])):
            return stopped
    return ""


def phases(plan: Plan, left: list[int]) -> list[list[int]]:
    """Returns the rows left: those of the preflight, wherever they stand in source order, and then the others."""
    parts = ([i for i in left if plan.is_preflight(i)], [i for i in left if not plan.is_preflight(i)])
    return [part for part in parts if part]


def _done(stage: int, rank: int) -> str:
    return f"phase {stage}: rank {rank} is done"


def _verdict(stage: int) -> str:
    return f"phase {stage}: verdict"
