"""What an experiment gives the row loop, and rows of it: the same for one process and for every rank."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from decode.batched import Job, in_flight
from decode.greedy import Steps
from experiments.harness.batching import batch_size
from experiments.harness.ledger import row_key
from experiments.harness.progress import Progress, RowProgress
from experiments.harness.rows import failed_row
from experiments.harness.tasks import RowName, Task
from minimodel.bits import RowFailure
from minimodel.decoder import Decoder

Row = dict[str, Any]
Inform = Callable[[str, str], None]


@dataclass(frozen=True)
class Plan:
    """Holds one experiment, ready to run. Rows are numbered in the manifest's row order."""

    manifest: dict[str, Any]
    preflight: int | frozenset[int]  # the first rows, or rows by index, that must pass before any later one is decoded
    gates: tuple[str, ...]  # the gates that a row carries even when it fails closed
    task: Callable[[int], Task | RowName]
    decode: Callable[[int, RowProgress], Steps[Row]]  # the steps of one row, which return its ledger entry
    model: Callable[[int], Decoder]  # the decoder whose steps those are
    longest: int  # the most tokens that any row's cache can hold
    batch_size: int | None  # rows decoded together; None: as many as were checked to keep their bits
    summarise: Callable[[list[Row]], dict[str, Any]]  # summary.json from all rows
    closing: Callable[[dict[str, Any]], list[str]]  # the lines for stdout from the summary
    part: Callable[[int], str] = field(default=lambda index: "")  # rows of different parts are not decoded together
    extra: Callable[[int], dict[str, Any]] = field(default=lambda index: {})  # fields of a row that fails closed too
    attachments: dict[str, str] = field(default_factory=dict)  # kept beside the ledger: name to text
    notes: Callable[[], list[str]] = list  # lines for stderr when all rows are there

    @property
    def total(self) -> int:
        return len(self.manifest["row_order"])

    def is_preflight(self, index: int) -> bool:
        return index < self.preflight if isinstance(self.preflight, int) else index in self.preflight


def decode_rows(
    plan: Plan, indices: Sequence[int], progress: Progress, inform: Inform
) -> Iterator[tuple[int, Row, Row]]:
    """Decodes rows and yields each, with its index and its timing, as it is done: in any order.

    Consecutive rows of one model are decoded together, as many at a time as `batch_size` says. A request that fails
    closed gives a row that says so. inform(part, text): how many, and why, before the first of them.
    """
    for part, group in itertools.groupby(indices, plan.part):
        yield from _decode_part(plan, list(group), progress, partial(inform, part))


def _decode_part(
    plan: Plan, rows: Sequence[int], progress: Progress, inform: Callable[[str], None]
) -> Iterator[tuple[int, Row, Row]]:
    """Decodes rows of one model, which is let go with the last of them."""
    batch = batch_size(plan.model(rows[0]), plan.batch_size, len(rows), plan.longest)
    inform(batch.text)
    for (index, clock), found in in_flight(_jobs(plan, rows, progress), batch.size, batch.together):
        row = found
        if isinstance(found, RowFailure):
            row = failed_row(plan.task(index), index, list(plan.gates), str(found), plan.extra(index))
        progress.row_done()
        arms = {arm: round(spent, 4) for arm, spent in clock.arms.items()}
        name = plan.manifest["row_order"][index]
        yield index, row, {"row": name, "seconds": round(clock.seconds, 4), "arms": arms}


def _jobs(plan: Plan, rows: Sequence[int], progress: Progress) -> Iterator[Job]:
    for index in rows:
        clock = progress.row(plan.task(index).id)
        yield Job((index, clock), plan.decode(index, clock), clock)


def preflight_failure(plan: Plan, index: int, row: Row) -> str:
    """A text, naming row and gates, when the run must stop at this row; else empty."""
    if row["passed"] or not plan.is_preflight(index):
        return ""
    failed = [gate for gate, passed in row["gates"].items() if not passed]
    return f"row {row_key(row)}: {row.get('failure') or ', '.join(failed)}"
