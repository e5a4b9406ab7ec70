"""A small matrix: its checkpoint, its tasks and its command line."""

from pathlib import Path

from tests.experiments.commands import write_tasks
from tests.tiny import write_checkpoint

ROWS = 5


def write_inputs(root: Path) -> Path:
    """tiny/ and tasks.jsonl."""
    write_checkpoint(root / "tiny")
    write_tasks(root / "tasks.jsonl", ROWS)
    return root


def arguments(inputs: Path, *more: object) -> list[object]:
    return [
        "--dtype",
        "bf16",
        "--checkpoint",
        inputs / "tiny",
        "--tasks",
        inputs / "tasks.jsonl",
        "--threads",
        1,
        "--preflight",
        2,
        *more,
    ]
