"""The recorder's command line, spelled as the experiments spell theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.harness.options import DEMO
from minimodel.numerics import DEFAULT_THREADS


@dataclass(frozen=True)
class RecordOptions:
    """What the command line said."""

    checkpoint: Path
    tasks: Path
    dtype: str
    out: Path | None
    limit: int | None
    preflight: int
    incremental: bool
    device: str
    threads: int
    fresh: bool
    quiet: bool
    save_boundaries: bool
    traced: tuple[str, ...]
    trace_last: int | None

    @property
    def directory(self) -> Path:
        return self.out if self.out is not None else Path("runs") / f"transformers-{self.dtype}"


def record_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option but --dtype and those of saving, spelled as the experiments spell them."""
    directory = click.Path(path_type=Path)
    for option in reversed(
        [
            click.option(
                "--checkpoint",
                type=directory,
                default=DEMO / "primary",
                show_default="the bundled demo's primary",
                metavar="DIR",
                help="An adapted checkpoint directory.",
            ),
            click.option(
                "--tasks",
                type=directory,
                default=DEMO / "tasks.jsonl",
                show_default="the bundled demo's",
                metavar="FILE",
                help="JSON lines: id, question, choices, answer.",
            ),
            click.option(
                "--out",
                type=directory,
                default=None,
                metavar="DIR",
                help="The run directory. [default: runs/transformers-DTYPE]",
            ),
            click.option(
                "--limit", type=click.IntRange(min=1), default=None, metavar="N", help="Only the first N rows."
            ),
            click.option(
                "--preflight",
                type=click.IntRange(min=0),
                default=8,
                show_default=True,
                metavar="N",
                help="The first N rows must pass every gate, or the run stops there.",
            ),
            click.option("--incremental", is_flag=True, help="Record the incremental arm too, and its replica."),
            click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
            click.option(
                "--threads",
                default=DEFAULT_THREADS,
                show_default=True,
                type=click.IntRange(1, 1024),
                help="CPU threads; the count can move bits, so it is fixed and recorded.",
            ),
            click.option("--fresh", is_flag=True, help="Set an old run aside as DIR.N and start anew."),
            click.option("--quiet", is_flag=True, help="No progress on stderr."),
        ]
    ):
        command = option(command)
    return command
