"""Long runs: memory flat after warm-up, no handle that stays open."""

import json
import os
from pathlib import Path

import pytest

from experiments.run.directory import RunDirectory
from tests.faults.conftest import write_small

MARKS = 20  # how often memory and handles are looked at


def record(path: Path, every: int) -> None:
    """In the child: after every so many rows, the resident bytes, the open handles and the ledger's size."""
    real, count = RunDirectory.append, 0

    def append(self: RunDirectory, row: dict, timing: dict) -> None:
        nonlocal count
        real(self, row, timing)
        count += 1
        if count % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident, handles = pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
            with open(path, "a") as file:
                file.write(json.dumps([count, resident, handles, (self.path / "rows.jsonl").stat().st_size]) + "\n")

    RunDirectory.append = append


def soak(root: Path, rows: int) -> list[list[int]]:
    small = write_small(root, rows)
    ended = small.run(root / "run", "--quiet", before=lambda: record(root / "marks", max(1, rows // MARKS)))
    assert ended.code == 0, ended
    assert (root / "run/rows.jsonl").read_bytes().count(b"\n") == rows
    return [json.loads(line) for line in (root / "marks").read_text().splitlines()]


@pytest.mark.slow
def test_memory_and_handles_stay_flat_over_a_thousand_rows(tmp_path):
    """After a fifth of the rows nothing grows but by the noise of the allocator: under 8 MB, far less than the rows."""
    marks = soak(tmp_path, 1000)
    print(
        "\n"
        + "\n".join(
            f"{n} rows: {rss / 1e6:.1f} MB, {fds} handles, ledger {size / 1e6:.1f} MB" for n, rss, fds, size in marks
        )
    )
    warm = marks[MARKS // 5 :]
    assert len({handles for _, _, handles, _ in warm}) == 1
    assert warm[-1][1] - warm[0][1] < 8e6


def test_handles_stay_the_same_over_ten_rows(tmp_path):
    marks = soak(tmp_path, 10)
    assert len(marks) == 10 and len({handles for _, _, handles, _ in marks}) == 1
