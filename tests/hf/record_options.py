"""The recorder's command line, spelled as the experiments spell theirs."""

from dataclasses import dataclass
from pathlib import Path

import click

from experiments.run.options import (
    DEVICE,
    FRESH,
    LIMIT,
    QUIET,
    TASKS,
    THREADS,
    Command,
    checkpoint_option,
    out_option,
    preflight_option,
    with_options,
)


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


def record_options(command: Command) -> Command:
    """Every option but --dtype and those of saving: the experiments' own, and --incremental."""
    inputs = [checkpoint_option(), TASKS, out_option("transformers-DTYPE"), LIMIT, preflight_option(8)]
    incremental = click.option("--incremental", is_flag=True, help="Record the incremental arm too, and its replica.")
    return with_options(command, [*inputs, incremental, DEVICE, THREADS, FRESH, QUIET])
