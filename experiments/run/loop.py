"""The row loop of every experiment: resume, preflight, decode, append, summarise; in one process or as one rank of
several.

Rows are decoded in two phases: the preflight, wherever its rows stand, and then the others. A row that is done before
an earlier one waits in a partial ledger and is moved to `rows.jsonl` in source order. Under torchrun rank 0 holds the
run directory. It first takes over what earlier jobs left, then sends which rows are left. Within a phase the n-th row
left goes to rank n modulo the number of ranks; every other rank appends to its partial ledger. After each phase
rank 0 moves their rows, checks the preflight, and lets the others go on. The ledger has the bytes that one process
writes, whatever the number of rows decoded together.
"""

import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.batched import Job, in_flight
from decode.independence import LARGEST, together_here
from experiments.report.summaries import run_report
from experiments.report.values import withheld
from experiments.run.costs import cache_bytes
from experiments.run.directory import PARTIAL, ROWS, Keep, RunDirectory, partial_ledger, require_same_manifest
from experiments.run.exits import DONE, END, GATE_FAILED, Ranks, current, one_line, say
from experiments.run.experiment import Experiment
from experiments.run.ledger import read_ledger, row_key
from experiments.run.options import RunOptions
from experiments.run.progress import Progress
from experiments.run.records import Manifest, Row, Timing
from minimodel.bits import RowFailure
from minimodel.decoder import Decoder
from minimodel.errors import InputError

CACHES = 7  # of one row at its fullest: the six boundaries of a transplant row, and the suffix decoder's working copy
Inform = Callable[[str, str], None]  # (part of the run, how many rows are decoded together and why)
OPENED, GO, STOP = "opened", "go", "stop"  # what rank 0 sends


@dataclass(frozen=True)
class Plan:
    """An experiment and the manifest that freezes its run."""

    experiment: Experiment[Any]
    manifest: Manifest
    preflight: Container[int]  # rows by index that must pass before any other is decoded
    batch_size: int | None  # rows decoded together; None: as many as were checked to keep their bits

    @property
    def total(self) -> int:
        return len(self.manifest["row_order"])


def run(
    experiment: Experiment[Any],
    manifest: Manifest,
    options: RunOptions,
    out: Path,
    preflight: Container[int] | None = None,
) -> int:
    """Decodes the missing rows; returns the exit code: 0, or 3 when a gate failed in any row.

    Under torchrun every rank decodes its share; rank 0 alone holds the directory, writes the summary and returns the
    verdict, and the others return 0 once it has. preflight: rows by index; the first --preflight rows without it.
    """
    plan = Plan(experiment, manifest, preflight or range(options.preflight), options.batch_size)
    job = current()
    if job.rank > 0:
        return _follow(plan, out, job)
    with closing(RunDirectory(out, manifest, options.fresh)) as directory:
        code = _run(plan, directory, job, options.quiet)
    job.tell(END)
    return code


def _run(plan: Plan, directory: RunDirectory, job: Ranks, quiet: bool) -> int:
    """Decodes the rows, writes summary and report, and returns the exit code."""
    out = directory.path
    held = directory.length + len(directory.waiting)
    progress = Progress(plan.total, held, quiet, job.world_size)
    if directory.dropped:
        progress.note(f"{out / ROWS}: dropped a torn last line of {directory.dropped} bytes; its row is redone")
    if directory.dropped_waiting:
        progress.note(f"{out / PARTIAL}: dropped torn last lines of {directory.dropped_waiting} bytes; redone")
    if held:
        progress.note(f"{out}: {held} rows are already there and kept")
    stopped = _lead(plan, directory, progress, job)
    progress.close()
    if stopped:
        say(f"preflight failed: {one_line(stopped)}; the run in {out} stopped before the remaining rows")
        return GATE_FAILED
    summary = plan.experiment.summarise(read_ledger(out / ROWS)[0])  # read back: a long run need not hold its rows
    directory.finish(summary, run_report(directory.manifest, summary))
    for line in plan.experiment.closing(summary) if summary["no_result"] is None else [withheld(summary)]:
        say(line)
    say(f"run: {out}")
    for line in plan.experiment.notes():
        say(line, err=True)
    return DONE if summary["passed"] else GATE_FAILED


def _lead(plan: Plan, directory: RunDirectory, progress: Progress, job: Ranks) -> str:
    """Decodes the missing rows, with the other ranks of a job. Returns a text, naming row and gates, when the preflight
    failed."""

    def inform(part: str, text: str) -> None:
        if directory.inform("batch", part or "all rows", text):
            progress.note(f"{part}: {text}" if part else text)

    def keep(index: int, row: Row, timing: Timing) -> str:
        directory.keep(index, row, timing)
        return _take_over(plan, directory)

    stopped = _first_failure(plan, dict(enumerate(directory.rows)))
    stopped = stopped or _take_over(plan, directory) or _first_failure(plan, directory.waiting)
    left = [i for i in range(directory.length, plan.total) if not stopped and i not in directory.waiting]
    job.tell(OPENED, json.dumps(left))
    for stage, rows in enumerate(phases(plan, left)):
        stopped = _decode_share(plan, rows, progress, job, inform, keep)
        for other in range(1, job.world_size):
            job.hear(f"phase {stage}: rank {other} is done", lambda: progress.counted(job.count()))
        progress.counted(job.count())
        directory.look_again()
        stopped = stopped or _take_over(plan, directory) or _first_failure(plan, directory.waiting)
        job.tell(f"phase {stage}: verdict", STOP if stopped else GO)
        if stopped:
            return stopped
    assert stopped or directory.length == plan.total, "every phase is done and rows are missing"
    return stopped


def _follow(plan: Plan, out: Path, job: Ranks) -> int:
    """Runs a rank other than 0: its share of every phase, without printing, until rank 0 has written the summary."""
    left = json.loads(job.hear(OPENED))
    try:
        require_same_manifest(plan.manifest, out)
    except InputError as error:
        raise InputError(f"rank {job.rank}: {error}") from None
    progress = Progress(plan.total, 0, quiet=True)
    for stage, rows in enumerate(phases(plan, left)):
        with partial_ledger(out, job.rank) as keep:
            _decode_share(plan, rows, progress, job, lambda part, text: None, keep)
        job.tell(f"phase {stage}: rank {job.rank} is done")
        if job.hear(f"phase {stage}: verdict") == STOP:
            break
    job.hear(END)
    return DONE


def _decode_share(plan: Plan, rows: list[int], progress: Progress, job: Ranks, inform: Inform, keep: Keep) -> str:
    """Decodes and keeps this process's rows of a phase. Returns a text when `keep` does, without decoding further.

    RankFailed when another rank has failed meanwhile: what is written stays.
    """
    job.check()
    for index, row, timing in decode_rows(plan, rows[job.rank :: job.world_size], progress, inform):
        if job.world_size > 1:
            timing |= {"rank": job.rank, "world_size": job.world_size}
        stopped: str | None = keep(index, row, timing)
        progress.counted(job.count(1))
        job.check()
        if stopped:
            return stopped
    return ""


def decode_rows(
    plan: Plan, indices: Sequence[int], progress: Progress, inform: Inform
) -> Iterator[tuple[int, Row, Timing]]:
    """Decodes rows and yields each, with its index and its timing, as it is done: in any order.

    Consecutive rows of one part are decoded together, as many at a time as `batch_size` returns, and `inform` is called
    before the first of them. A request that fails closed gives a row with its `failure`.
    """
    experiment = plan.experiment

    def jobs(rows: Sequence[int]) -> Iterator[Job]:
        for index in rows:
            clock = progress.row(experiment.task(index).id)
            yield Job((index, clock), experiment.row(index, clock), clock)

    for part, group in itertools.groupby(indices, experiment.part):
        rows = list(group)
        batch = batch_size(experiment.model(rows[0]), plan.batch_size, len(rows), experiment.longest)
        inform(part, batch.text)
        for (index, clock), found in in_flight(jobs(rows), batch.size, batch.together):
            row = experiment.failed_row(index, str(found)) if isinstance(found, RowFailure) else found
            progress.row_done()
            arms = {arm: round(spent, 4) for arm, spent in clock.arms.items()}
            seconds = round(clock.seconds, 4)
            yield index, row, {"row": plan.manifest["row_order"][index], "seconds": seconds, "arms": arms}
        del batch  # and with it this part's model, before the next one's is loaded


def _take_over(plan: Plan, directory: RunDirectory) -> str:
    """Moves waiting rows into `rows.jsonl` until one is missing. Returns a text at a failed preflight row."""
    while (row := directory.take()) is not None:
        if stopped := preflight_failure(plan, directory.length - 1, row):
            return stopped
    return ""


def _first_failure(plan: Plan, rows: Mapping[int, Row]) -> str:
    """Returns a text when a preflight row failed that stands among `rows`, which are by index."""
    return next((text for index in sorted(rows) if (text := preflight_failure(plan, index, rows[index]))), "")


def preflight_failure(plan: Plan, index: int, row: Row) -> str:
    """Returns a text, naming row and gates, when the run must stop at this row; else empty."""
    if row["passed"] or index not in plan.preflight:
        return ""
    failed = [gate for gate, passed in row["gates"].items() if not passed]
    return f"row {row_key(row)}: {row.get('failure') or ', '.join(failed)}"


def phases(plan: Plan, left: list[int]) -> list[list[int]]:
    """Returns the rows left: those of the preflight, wherever they stand in source order, and then the others."""
    parts = ([i for i in left if i in plan.preflight], [i for i in left if i not in plan.preflight])
    return [part for part in parts if part]


@dataclass(frozen=True)
class Batch:
    """Rows decoded together."""

    size: int
    together: Decoder  # runs their common steps
    text: str  # how many, and why; one line


def batch_size(model: Decoder, chosen: int | None, rows: int, longest: int) -> Batch:
    """Returns --batch-size rows, or at most 16 of the `rows` left. A row's caches hold up to `longest` tokens.

    InputError when --batch-size rows would not keep the bits they have alone, or not fit into memory.
    """
    if chosen == 1 or rows == 1:
        return Batch(1, model, "1 row at a time: " + ("as --batch-size says" if chosen == 1 else "one is left"))
    wanted = LARGEST if chosen is None else chosen
    found = together_here(model, wanted)
    free, row = free_bytes(model.numeric.torch_device), CACHES * cache_bytes(model.config, model.numeric.dtype, longest)
    fitting, memory = wanted, f"a row's caches take up to {row} bytes, and {free} are free"
    if free is not None:
        fitting = free // row
    if chosen is not None and min(found.size, fitting) < chosen:
        why = f"{found.limit}: other bits than alone" if found.size < chosen else memory
        raise InputError(f"--batch-size: expected at most {min(found.size, fitting)} here ({why}), found {chosen}")
    size = max(1, min(wanted, found.size, fitting))
    why = f"every part of a step was checked to keep its bits up to {2 * found.size} rows of the batch"
    if found.size < wanted:
        why = f"{found.limit} of the batch: other bits than alone"
    return Batch(size, found.model, f"{size} rows at a time: {memory if size < found.size else why}")


def free_bytes(device: torch.device) -> int | None:
    """Returns the memory that is free on the device now; None where the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["MemAvailable"].split()[0]) << 10 if "MemAvailable" in found else None
