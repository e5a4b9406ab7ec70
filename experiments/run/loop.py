"""How many rows a run decodes together: what keeps every bit on this machine, and what its memory holds.

The row loop of every experiment: resume, preflight, decode, append, summarise; alone, or as one rank of several.

Under torchrun rank 0 holds the run directory. It first takes over what earlier jobs left in partial ledgers, then sends
which rows are left. These go in two phases: the preflight, wherever its rows stand, and then the others. Within a phase
the n-th row left goes to rank n modulo the number of ranks, which appends it to a partial ledger of its own. After each
phase rank 0 moves rows from there to `rows.jsonl` in source order, checks the preflight, and lets the others go on. The
ledger has the bytes that a single process writes.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.batched import Job, in_flight
from decode.independence import LARGEST, together_here
from experiments.report.summaries import run_report
from experiments.report.values import withheld
from experiments.run.directory import PartialLedger, RunDirectory, require_same_manifest
from experiments.run.exits import DONE, END, GATE_FAILED, Ranks, current, one_line, say
from experiments.run.experiment import Experiment
from experiments.run.ledger import row_key
from experiments.run.options import RunOptions
from experiments.run.progress import Progress
from experiments.run.records import Manifest, Row, Timing
from minimodel.bits import COPIES, RowFailure
from minimodel.decoder import Decoder
from minimodel.errors import InputError

CACHES = 7  # of one row at its fullest: the six boundaries of a transplant row, and the suffix decoder's working copy


@dataclass(frozen=True)
class Batch:
    """Rows decoded together."""

    size: int
    together: Decoder  # what takes their common steps
    text: str  # how many, and why; one line


def batch_size(model: Decoder, asked: int | None, rows: int, longest: int) -> Batch:
    """As many rows as asked for, or at most 16 of the `rows` left. A row's caches hold up to `longest` tokens.

    InputError when so many were asked for and they would not keep the bits they have alone, or not fit into memory.
    """
    if asked == 1 or rows == 1:
        return Batch(1, model, "1 row at a time: " + ("as asked for" if asked == 1 else "one is left"))
    wanted = LARGEST if asked is None else asked
    found = together_here(model, wanted)
    fitting, memory = _fitting(model, longest)
    if asked is not None and min(found.size, fitting) < asked:
        why = f"{found.limit}: other bits than alone" if found.size < asked else memory
        raise InputError(f"--batch-size: expected at most {min(found.size, fitting)} here ({why}), found {asked}")
    size = max(1, min(wanted, found.size, fitting))
    why = f"every part of a step was checked to keep its bits up to {2 * found.size} rows of the batch"
    if found.size < wanted:
        why = f"{found.limit} of the batch: other bits than alone"
    return Batch(size, found.model, f"{size} rows at a time: {memory if size < found.size else why}")


def _fitting(model: Decoder, longest: int) -> tuple[int, str]:
    """The rows whose caches fit into the memory that is free now, and a text that says so."""
    config = model.config
    entries = 2 * config.num_hidden_layers * COPIES * config.num_key_value_heads * longest * config.head_dim
    row = CACHES * entries * model.numeric.torch_dtype.itemsize
    free = free_bytes(model.numeric.torch_device)
    if free is None:
        return 1 << 30, ""
    return free // row, f"a row's caches take up to {row} bytes, and {free} are free"


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["MemAvailable"].split()[0]) << 10 if "MemAvailable" in found else None


Inform = Callable[[str, str], None]
OPENED, GO, STOP = "opened", "go", "stop"  # what rank 0 sends


@dataclass(frozen=True)
class Plan:
    """An experiment and the manifest that freezes its run."""

    experiment: Experiment[Any]
    manifest: Manifest
    preflight: int | frozenset[int]  # the first rows, or rows by index, that must pass before any later one is decoded
    batch_size: int | None  # rows decoded together; None: as many as were checked to keep their bits
    attachments: Mapping[str, str] = field(default_factory=dict)  # texts kept beside the ledger, by file name

    @property
    def total(self) -> int:
        return len(self.manifest["row_order"])

    def is_preflight(self, index: int) -> bool:
        return index < self.preflight if isinstance(self.preflight, int) else index in self.preflight


def run(experiment: Experiment[Any], manifest: Manifest, options: RunOptions, out: Path, **more: Any) -> int:
    """Runs an experiment as the options say; returns the exit code. more: other fields of the `Plan`."""
    fields = {"preflight": options.preflight, "batch_size": options.batch_size, **more}
    return run_plan(Plan(experiment, manifest, **fields), out, options.fresh, options.quiet)


def run_plan(plan: Plan, out: Path, fresh: bool, quiet: bool) -> int:
    """Runs what is not there yet; returns the exit code: 0, or 3 when a gate failed in any row.

    Under torchrun every rank decodes its share; rank 0 alone holds the directory, sums up and returns the verdict, and
    the others return 0 once it has.
    """
    job = current()
    if job is not None and job.rank > 0:
        return _follow(plan, out, job)
    directory = RunDirectory(out, plan.manifest, fresh)
    try:
        code = _run(plan, directory, job, quiet)
    finally:
        directory.close()
    if job is not None:
        job.tell(END)
    return code


def _run(plan: Plan, directory: RunDirectory, job: Ranks | None, quiet: bool) -> int:
    """Rows, summary and report; returns the exit code."""
    out = directory.path
    for name, text in plan.attachments.items():
        directory.attach(name, text)
    progress = _opened(plan, directory, quiet, 1 if job is None else job.world_size)
    stopped = _run_rows(plan, directory, progress) if job is None else _lead(plan, directory, progress, job)
    progress.close()
    if stopped:
        say(f"preflight failed: {one_line(stopped)}; the run in {out} stopped before the remaining rows")
        return GATE_FAILED
    summary = plan.experiment.summarise(directory.written())
    directory.finish(summary, run_report({**directory.manifest}, {**summary}))
    for line in plan.experiment.closing(summary) if summary["no_result"] is None else [withheld(summary)]:
        say(line)
    say(f"run: {out}")
    for line in plan.experiment.notes():
        say(line, err=True)
    return DONE if summary["passed"] else GATE_FAILED


def _opened(plan: Plan, directory: RunDirectory, quiet: bool, processes: int) -> Progress:
    """Returns the run's progress, having noted what was dropped and what is kept."""
    held = directory.length + len(directory.waiting)
    progress = Progress(plan.total, held, quiet, processes)
    if directory.dropped:
        path = directory.path / "rows.jsonl"
        progress.note(f"{path}: dropped a torn last line of {directory.dropped} bytes; its row is redone")
    if directory.dropped_waiting:
        path = directory.path / "partial"
        progress.note(f"{path}: dropped torn last lines of {directory.dropped_waiting} bytes; redone")
    if held:
        progress.note(f"{directory.path}: {held} rows are already there and kept")
    return progress


def decode_rows(
    plan: Plan, indices: Sequence[int], progress: Progress, inform: Inform
) -> Iterator[tuple[int, Row, Timing]]:
    """Decodes rows and yields each, with its index and its timing, as it is done: in any order.

    Consecutive rows of one part are decoded together, as many at a time as `batch_size` says. A request that fails
    closed gives a row that says so. inform(part, text): how many, and why, before the first of them.
    """
    for part, group in itertools.groupby(indices, plan.experiment.part):
        yield from _decode_part(plan, list(group), progress, partial(inform, part))


def _decode_part(
    plan: Plan, rows: Sequence[int], progress: Progress, inform: Callable[[str], None]
) -> Iterator[tuple[int, Row, Timing]]:
    """Decodes rows of one model, which is let go with the last of them."""
    experiment = plan.experiment
    batch = batch_size(experiment.model(rows[0]), plan.batch_size, len(rows), experiment.longest)
    inform(batch.text)
    for (index, clock), found in in_flight(_jobs(experiment, rows, progress), batch.size, batch.together):
        row = experiment.failed_row(index, str(found)) if isinstance(found, RowFailure) else found
        progress.row_done()
        arms = {arm: round(spent, 4) for arm, spent in clock.arms.items()}
        name = plan.manifest["row_order"][index]
        yield index, row, {"row": name, "seconds": round(clock.seconds, 4), "arms": arms}


def _jobs(experiment: Experiment[Any], rows: Sequence[int], progress: Progress) -> Iterator[Job]:
    for index in rows:
        clock = progress.row(experiment.task(index).id)
        yield Job((index, clock), experiment.row(index, clock), clock)


def _run_rows(plan: Plan, directory: RunDirectory, progress: Progress) -> str:
    """Decodes the missing rows, the preflight first; returns a text, naming row and gates, when it failed."""
    stopped = _take_over(plan, directory, 0) or _waiting_failure(plan, directory)
    for rows in [] if stopped else phases(plan, _missing(plan, directory)):
        stopped = stopped or _append_in_order(plan, directory, progress, rows)
    return stopped


def _append_in_order(plan: Plan, directory: RunDirectory, progress: Progress, rows: list[int]) -> str:
    """Decodes rows and writes each once all before it are there; those that wait for rows of a later phase are put
    aside. Returns a text when a row of the preflight failed."""
    done: dict[int, tuple[Row, Timing]] = {}
    try:
        for index, row, timing in decode_rows(plan, rows, progress, _informing(directory, progress)):
            done[index] = row, timing
            while directory.length in done:
                first = directory.length
                row, timing = done.pop(first)
                directory.append(row, timing)
                stopped = preflight_failure(plan, first, row) or _take_over(plan, directory, directory.length)
                if stopped:
                    return stopped
        directory.put_aside([done.pop(index) for index in sorted(done)])
    finally:
        if done:
            progress.note(f"{len(done)} rows were done before an earlier one and are not written; they are redone")
    return _waiting_failure(plan, directory)


def _lead(plan: Plan, directory: RunDirectory, progress: Progress, job: Ranks) -> str:
    """Rank 0's part; returns a text, naming row and gates, when the preflight failed."""
    stopped = _take_over(plan, directory, 0) or _waiting_failure(plan, directory)
    left = [] if stopped else _missing(plan, directory)
    job.tell(OPENED, json.dumps(left))
    for stage, rows in enumerate(phases(plan, left)):
        _decode_share(plan, rows, directory.path, progress, job, _informing(directory, progress))
        for other in range(1, job.world_size):
            job.hear(_done(stage, other), lambda: progress.counted(job.rows_counted()))
        progress.counted(job.rows_counted())
        directory.look_again()
        stopped = _take_over(plan, directory, directory.length) or _waiting_failure(plan, directory)
        job.tell(_verdict(stage), STOP if stopped else GO)
        if stopped:
            return stopped
    assert stopped or directory.length == plan.total, "every phase is done and rows are missing"
    return stopped


def _follow(plan: Plan, out: Path, job: Ranks) -> int:
    """Any other rank's part: its share of every phase, without printing, until rank 0 has summed up."""
    left = json.loads(job.hear(OPENED))
    try:
        require_same_manifest(plan.manifest, out)
    except InputError as error:
        raise InputError(f"rank {job.rank}: {error}") from None
    progress = Progress(plan.total, 0, quiet=True)
    for stage, rows in enumerate(phases(plan, left)):
        _decode_share(plan, rows, out, progress, job, lambda part, text: None)
        job.tell(_done(stage, job.rank))
        if job.hear(_verdict(stage)) == STOP:
            break
    job.hear(END)
    return DONE


def _decode_share(plan: Plan, rows: list[int], out: Path, progress: Progress, job: Ranks, inform: Inform) -> None:
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


def _informing(directory: RunDirectory, progress: Progress) -> Inform:
    """Returns what writes to stderr and into the manifest's information how many rows are decoded together, and why."""

    def inform(part: str, text: str) -> None:
        if directory.inform("batch", part or "all rows", text):
            progress.note(f"{part}: {text}" if part else text)

    return inform


def _missing(plan: Plan, directory: RunDirectory) -> list[int]:
    """Returns the rows that neither the ledger nor a partial ledger holds."""
    return [index for index in range(directory.length, plan.total) if index not in directory.waiting]


def _take_over(plan: Plan, directory: RunDirectory, start: int) -> str:
    """Moves rows from `start` on into `rows.jsonl` until one is missing; a text at a failed row of the preflight."""
    for index in range(start, plan.total):
        row = directory.take(index)
        if row is None:
            break
        if stopped := preflight_failure(plan, index, row):
            return stopped
    return ""


def _waiting_failure(plan: Plan, directory: RunDirectory) -> str:
    """Returns a text when a preflight row failed that still waits in a partial ledger for the rows before it."""
    for index, line in sorted(directory.waiting.items()):
        if plan.is_preflight(index) and (stopped := preflight_failure(plan, index, line.read()[1])):
            return stopped
    return ""


def preflight_failure(plan: Plan, index: int, row: Row) -> str:
    """Returns a text, naming row and gates, when the run must stop at this row; else empty."""
    if row["passed"] or not plan.is_preflight(index):
        return ""
    failed = [gate for gate, passed in row["gates"].items() if not passed]
    return f"row {row_key(row)}: {row.get('failure') or ', '.join(failed)}"


def phases(plan: Plan, left: list[int]) -> list[list[int]]:
    """Returns the rows left: those of the preflight, wherever they stand in source order, and then the others."""
    parts = ([i for i in left if plan.is_preflight(i)], [i for i in left if not plan.is_preflight(i)])
    return [part for part in parts if part]


def _done(stage: int, rank: int) -> str:
    return f"phase {stage}: rank {rank} is done"


def _verdict(stage: int) -> str:
    return f"phase {stage}: verdict"
