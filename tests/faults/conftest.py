"""One small matrix run, undisturbed, and what is needed to run it again under every kind of fault."""

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import numeric
from tests.experiments.commands import write_tasks
from tests.faults.forked import Ended, in_child, matrix, send_at_call
from tests.tiny import write_checkpoint

ROWS = 5
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL["num_key_value_heads"] = 1
CAPS = {"branch": 3, "merge": 6, "answer": 3}


@dataclass(frozen=True)
class Small:
    """A checkpoint, tasks, and a folder for what the children write."""

    root: Path
    tasks: Path

    @property
    def checkpoint(self) -> Path:
        return self.root / "tiny"

    def arguments(self, out: Path, *more: object, threads: int = 1) -> list[object]:
        """One row at a time, unless `more` says otherwise: a moment can then be chosen by rows."""
        inputs = ["--checkpoint", self.checkpoint, "--tasks", self.tasks, "--preflight", 2, "--batch-size", 1]
        return ["--dtype", "bf16", *inputs, "--threads", threads, "--out", out, *more]

    def run(self, out: Path, *more: object, before: Any = None, after: Any = None, threads: int = 1) -> Ended:
        """The command in a forked child; `before` runs in it first, `after(pid)` here while it lives."""
        return in_child(matrix(self.arguments(out, *more, threads=threads), before), self.root, after)

    def copy(self, root: Path) -> "Small":
        """The same with another copy of the checkpoint, which a test may change."""
        shutil.copytree(self.checkpoint, root / "tiny")
        return dataclasses.replace(self, root=root)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: its directory, and its number of calls at the start and the end of every row."""

    directory: Path
    calls: list[int]

    @property
    def rows(self) -> bytes:
        return (self.directory / "rows.jsonl").read_bytes()


def write_small(root: Path, rows: int = ROWS) -> Small:
    write_checkpoint(root / "tiny", config=SMALL, contract={"caps": CAPS})
    return Small(root, write_tasks(root / "tasks.jsonl", rows))


def run_undisturbed(small: Small) -> Reference:
    counts = small.root / "calls.txt"
    ended = small.run(small.root / "undisturbed", before=lambda: send_at_call(0, -1, counts))
    assert ended.code == 0, ended.stderr
    return Reference(small.root / "undisturbed", [int(line) for line in counts.read_text().split()])


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    os.environ.setdefault("RUST_BACKTRACE", "0")
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def undisturbed(small):
    numeric("bf16").apply()  # as before every test: what this caches here, no child counts calls for
    return run_undisturbed(small)
