"""The benchmark's command line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.benchmark.arms import COLUMNS
from experiments.benchmark.limits import chosen
from experiments.run.options import DEMO
from minimodel.numerics import DEFAULT_THREADS, DTYPES, NumericContract

PARTS = ("decode", "prefill", "build", "row", "batch", "memory", "growth")
BATCH = 512  # tokens of the longest request of a batch
CONTEXTS, PREFILLS, PREFIX, GROWTH = (128, 512, 2048, 4096), (512, 2000), 2000, 8192


@dataclass(frozen=True)
class BenchOptions:
    """What the command line said; a length of None takes its default, cut to what the context allows."""

    checkpoint: Path
    tasks: Path
    dtype: str
    device: str
    threads: int
    columns: str
    reference: str | None
    only: str | None
    context: str | None
    prefill: str | None
    prefix: int | None
    growth: bool
    length: int | None
    repeats: int
    long_repeats: int
    steps: int
    block: int
    buffer: int
    out: Path | None
    fresh: bool
    quiet: bool

    @property
    def directory(self) -> Path:
        return self.out if self.out is not None else Path("runs") / f"benchmark-{self.dtype}"

    @property
    def parts(self) -> tuple[str, ...]:
        """What is measured: everything but the growth, or what --only names; --growth adds it."""
        named = PARTS[:-1] if self.only is None else chosen("--only", self.only, PARTS)
        return tuple(part for part in PARTS if part in named or (part == "growth" and self.growth))

    @property
    def numeric(self) -> NumericContract:
        return NumericContract(dtype=self.dtype, device=self.device, threads=self.threads)

    def note(self, text: str) -> None:
        """A line of progress on stderr."""
        if not self.quiet:
            click.echo(text, err=True)


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option."""
    for option in reversed([*_inputs(), *_lengths(), *_counts(), *_outputs()]):
        command = option(command)
    return command


def _inputs() -> list[Callable[..., Any]]:
    path = click.Path(path_type=Path)
    demo = "the bundled demo's"
    return [
        click.option(
            "--checkpoint",
            type=path,
            default=DEMO / "primary",
            show_default=f"{demo} primary",
            metavar="DIR",
            help="An adapted checkpoint directory.",
        ),
        click.option(
            "--tasks",
            type=path,
            default=DEMO / "tasks.jsonl",
            show_default=demo,
            metavar="FILE",
            help="JSON lines; the first task is the matrix row that is timed.",
        ),
        click.option(
            "--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Dtype of every column."
        ),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
        click.option(
            "--threads",
            type=click.IntRange(1, 1024),
            default=DEFAULT_THREADS,
            show_default=True,
            help="CPU threads of all.",
        ),
        click.option(
            "--columns",
            default=",".join(COLUMNS),
            show_default=True,
            metavar="NAMES",
            help="Kernels to time, one column each; ATTENTION+packed has prepacked linear weights.",
        ),
        click.option(
            "--reference",
            default=None,
            metavar="MODULE",
            help="Another implementation as one more column: a module with open_arm(directory, numeric), such as "
            "tests.hf.bench_arm for transformers.",
        ),
        click.option(
            "--only",
            default=None,
            metavar="PARTS",
            help=f"What to measure, of {','.join(PARTS)}. [default: all but growth]",
        ),
    ]


def _lengths() -> list[Callable[..., Any]]:
    default = "as far as the context goes"
    number = click.IntRange(min=1)
    contexts, prefills = (",".join(map(str, lengths)) for lengths in (CONTEXTS, PREFILLS))
    return [
        click.option(
            "--context",
            default=None,
            metavar="N,N",
            help=f"Time decode steps after so many cached tokens. [default: {contexts}, {default}]",
        ),
        click.option(
            "--prefill",
            default=None,
            metavar="N,N",
            help=f"Time one-call prefills of so many tokens. [default: {prefills}, {default}]",
        ),
        click.option(
            "--prefix",
            type=number,
            default=None,
            metavar="N",
            help=f"Time an incremental build of so many tokens, one at a time. [default: {PREFIX}, {default}]",
        ),
        click.option(
            "--growth", is_flag=True, help="Also time an incremental build block by block and draw cost against length."
        ),
        click.option(
            "--length",
            type=number,
            default=None,
            metavar="N",
            help=f"Tokens of the build that --growth times. [default: {GROWTH}, {default}]",
        ),
    ]


def _counts() -> list[Callable[..., Any]]:
    number = click.IntRange(min=1)
    return [
        click.option(
            "--repeats", type=number, default=7, show_default=True, help="Times each decode and prefill is measured."
        ),
        click.option(
            "--long-repeats",
            type=number,
            default=7,
            show_default=True,
            help="Times each build, row and load is measured.",
        ),
        click.option("--steps", type=number, default=24, show_default=True, help="Decode steps per sample."),
        click.option("--block", type=number, default=128, show_default=True, help="Tokens per turn of a build."),
        click.option(
            "--buffer",
            type=number,
            default=1024,
            show_default=True,
            metavar="MIB",
            help="Buffer whose streaming read gives the memory bandwidth; far larger than the CPU's caches.",
        ),
    ]


def _outputs() -> list[Callable[..., Any]]:
    return [
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=None,
            metavar="DIR",
            help="Directory of benchmark.json and the report. [default: runs/benchmark-DTYPE]",
        ),
        click.option("--fresh", is_flag=True, help="Set an earlier benchmark aside as DIR.N."),
        click.option("--quiet", is_flag=True, help="No progress on stderr."),
    ]
