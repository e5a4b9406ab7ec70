"""A small matrix over several ranks, ranks that stop or die at a row, and what must be on disk afterwards."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from experiments.run.progress import Progress, RowProgress
from tests.experiments.run.jobs import Job, run_job
from tests.faults.conftest import Small
from tests.faults.forked import matrix


def sharded(
    small: Small,
    out: Path,
    size: int,
    *more: object,
    before: Callable[[int], None] | None = None,
    meanwhile: Callable[[list[int]], None] | None = None,
    given: dict[int, list[object]] | None = None,
) -> Job:
    """The matrix over `size` ranks. before(rank) runs in each first; given: arguments of one rank alone."""

    def body(rank: int) -> Callable[[], int]:
        arguments = small.arguments(out, *more, *(given or {}).get(rank, []))
        return matrix(arguments, None if before is None else lambda: before(rank))

    return run_job([body(rank) for rank in range(size)], out.with_name(f"{out.name}-said"), meanwhile)


def require_same(out: Path, alone: Path) -> None:
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name
    assert not (out / "partial").exists(), "all of it stands in rows.jsonl"


def there(out: Path) -> set[str]:
    """The rows on disk, wherever."""
    files = [*out.glob("partial/rows-*.jsonl"), *out.glob("rows.jsonl")]
    complete = [line for path in files for line in path.read_text().rpartition("\n")[0].splitlines()]
    return {json.loads(line)["row"] for line in complete}


def stop_at_row(count: int, act: Callable[[], None]) -> None:
    """In a rank: acts as the row after so many begins."""
    real, left = Progress.row, iter(range(count))

    def row(self: Progress, name: str) -> RowProgress:
        if next(left, None) is None:
            act()
        return real(self, name)

    Progress.row = row  # type: ignore[method-assign]


def die_at(out: Path, rows: int) -> None:
    """SIGKILL for this rank, once so many rows are on disk."""
    deadline = time.monotonic() + 60
    while len(there(out)) < rows:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def forbid() -> None:
    raise AssertionError("a row is decoded again")
