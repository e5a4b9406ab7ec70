"""What an experiment hands to the row loop, and one row of it: shared by a process of its own and by every rank."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode.greedy import RowFailure
from experiments.harness.ledger import row_key
from experiments.harness.progress import Progress
from experiments.harness.rows import failed_row
from experiments.harness.tasks import RowName, Task


@dataclass(frozen=True)
class Plan:
    """One experiment, ready to run.

    decode(index, progress) gives row `index` of the manifest's row order; task(index) names it. gates: names a row
    carries even when it fails closed. summarise(rows) gives summary.json; closing(summary) the
    lines for stdout. preflight: the first rows, or rows by index, that must pass before any later
    one is decoded. extra(index): fields that a row carries even when it fails closed. attachments: inputs kept beside
    the ledger, name to text, written before the first row. notes(): lines for stderr when all rows are there.
    """

    manifest: dict[str, Any]
    preflight: int | frozenset[int]
    gates: tuple[str, ...]
    task: Callable[[int], Task | RowName]
    decode: Callable[[int, Progress], dict[str, Any]]
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]
    closing: Callable[[dict[str, Any]], list[str]]
    extra: Callable[[int], dict[str, Any]] = field(default=lambda index: {})
    attachments: dict[str, str] = field(default_factory=dict)
    notes: Callable[[], list[str]] = list

    @property
    def total(self) -> int:
        return len(self.manifest["row_order"])

    def is_preflight(self, index: int) -> bool:
        return index < self.preflight if isinstance(self.preflight, int) else index in self.preflight


def decode_row(plan: Plan, index: int, progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row and its timing; a request that fails closed gives a row that says so."""
    start = time.monotonic()
    progress.row(plan.task(index).id)
    try:
        row = plan.decode(index, progress)
    except RowFailure as failure:
        row = failed_row(plan.task(index), index, list(plan.gates), str(failure), plan.extra(index))
    progress.row_done()
    arms = {arm: round(spent, 4) for arm, spent in progress.arms.items()}
    seconds = round(time.monotonic() - start, 4)
    return row, {"row": plan.manifest["row_order"][index], "seconds": seconds, "arms": arms}


def preflight_failure(plan: Plan, index: int, row: dict[str, Any]) -> str:
    """A text, naming row and gates, when the run must stop at this row; else empty."""
    if row["passed"] or not plan.is_preflight(index):
        return ""
    failed = [gate for gate, passed in row["gates"].items() if not passed]
    return f"row {row_key(row)}: {row.get('failure') or ', '.join(failed)}"
