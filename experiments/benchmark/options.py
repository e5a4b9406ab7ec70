"""The benchmark's command line, and the lengths that a checkpoint's context allows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from experiments.benchmark.arms import COLUMNS
from experiments.benchmark.child import STEPS
from experiments.run.options import DEMO, QUIET, Decorator, checkpoint_option
from minimodel.errors import InputError, refuse
from minimodel.numerics import DEFAULT_THREADS, DTYPES, NumericContract

PARTS = ("decode", "prefill", "build", "row", "batch", "memory", "growth")
BATCH = 512  # tokens of the longest request of a batch
CONTEXTS, PREFILLS, PREFIX, GROWTH = (128, 512, 2048, 4096), (512, 2000), 2000, 8192


@dataclass(frozen=True)
class BenchOptions:
    """The command line. A length of None takes its default, cut to what the context allows."""

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
        """Returns what is measured: all parts but growth, or those of --only; --growth adds growth."""
        named = PARTS[:-1] if self.only is None else chosen("--only", self.only, PARTS)
        return tuple(part for part in PARTS if part in named or (part == "growth" and self.growth))

    @property
    def numeric(self) -> NumericContract:
        return NumericContract(dtype=self.dtype, device=self.device, threads=self.threads)

    def note(self, text: str) -> None:
        """Writes a line of progress to stderr."""
        if not self.quiet:
            click.echo(text, err=True)


def _number(name: str, default: int | None, text: str, **more: Any) -> Decorator:
    """Returns an option for a number of at least 1."""
    shown = default is not None
    return click.option(name, type=click.IntRange(min=1), default=default, show_default=shown, help=text, **more)


def _lengths(name: str, default: tuple[int, ...], text: str) -> Decorator:
    """Returns an option for lengths, by default those of `default` that the context allows."""
    return click.option(name, default=None, metavar="N,N", help=_cut(text, default))


def _length(name: str, default: int, text: str) -> Decorator:
    """Returns an option for one length, by default `default` or what the context allows."""
    return _number(name, None, _cut(text, (default,)), metavar="N")


def _cut(text: str, default: tuple[int, ...]) -> str:
    return f"{text} [default: {','.join(map(str, default))}, as far as the context goes]"


FILE = click.Path(path_type=Path)
INPUTS: list[Decorator] = [
    checkpoint_option(),
    click.option("--tasks", type=FILE, default=DEMO / "tasks.jsonl", show_default="the bundled demo's", metavar="FILE",
                 help="JSON lines; the first task is the matrix row that is timed."),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True,
                 help="Dtype of every column."),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
    click.option("--threads", type=click.IntRange(1, 1024), default=DEFAULT_THREADS, show_default=True,
                 help="CPU threads of every column."),
    click.option("--columns", default=",".join(COLUMNS), show_default=True, metavar="NAMES",
                 help="Kernels to time, one column each; ATTENTION+packed has prepacked linear weights."),
    click.option("--reference", default=None, metavar="MODULE",
                 help="Another implementation as one more column: a module with open_arm(directory, numeric), such as "
                 "tests.hf.bench_arm for transformers."),
    click.option("--only", default=None, metavar="PARTS",
                 help=f"What to measure, of {','.join(PARTS)}. [default: all but growth]"),
]  # fmt: skip
LENGTHS: list[Decorator] = [
    _lengths("--context", CONTEXTS, "Time decode steps after so many cached tokens."),
    _lengths("--prefill", PREFILLS, "Time one-call prefills of so many tokens."),
    _length("--prefix", PREFIX, "Time an incremental build of so many tokens, one at a time."),
    click.option("--growth", is_flag=True,
                 help="Also time an incremental build block by block and draw cost against length."),
    _length("--length", GROWTH, "Tokens of the build that --growth times."),
]  # fmt: skip
COUNTS: list[Decorator] = [
    _number("--repeats", 7, "Times each decode and prefill is measured."),
    _number("--long-repeats", 7, "Times each build, row and load is measured."),
    _number("--steps", 24, "Decode steps per sample."),
    _number("--block", 128, "Tokens per turn of a build."),
    _number("--buffer", 1024, "Buffer whose streaming read gives the memory bandwidth; far larger than the CPU's "
            "caches.", metavar="MIB"),
]  # fmt: skip
OUTPUTS: list[Decorator] = [
    click.option("--out", type=FILE, default=None, metavar="DIR",
                 help="Directory of benchmark.json and the report. [default: runs/benchmark-DTYPE]"),
    click.option("--fresh", is_flag=True, help="Set an earlier benchmark aside as DIR.N."),
    QUIET,
]  # fmt: skip


@dataclass
class Lengths:
    """Lengths against a context: a given one that does not fit is refused, a default is cut or left out."""

    limit: int  # max_position_embeddings
    least: int  # a length must be greater
    omitted: list[str] = field(default_factory=list)  # a sentence per default that did not fit

    def several(self, option: str, given: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the lengths of a comma-separated option; without it the defaults that fit."""
        if given is not None:
            return tuple(self._checked(option, length) for length in _numbers(option, given))
        for length in default:
            if length > self.limit:
                self.omitted.append(f"{option} {length}: beyond max_position_embeddings {self.limit}")
        return tuple(length for length in default if self.least < length <= self.limit)

    def one(self, option: str, given: int | None, default: int) -> int:
        """Returns one length; without the option the default, at most the limit."""
        if given is not None:
            return self._checked(option, given)
        if default > self.limit:
            self.omitted.append(f"{option} {default}: cut to max_position_embeddings {self.limit}")
        return min(default, self.limit)

    def _checked(self, option: str, length: int) -> int:
        if not self.least < length <= self.limit:
            raise refuse(option, f"{self.least + 1} to max_position_embeddings {self.limit}", length)
        return length


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option}: expected whole numbers with commas between, found {text!r}") from None


def chosen(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of a comma-separated option in the order of `known`. InputError for any other name."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise refuse(option, f"names of {', '.join(known)}", name)
    return tuple(name for name in known if name in names)


@dataclass(frozen=True)
class Asked:
    """The lengths to measure, in tokens."""

    contexts: tuple[int, ...]  # of decode steps
    prefills: tuple[int, ...]
    prefix: int  # of one incremental build
    longest: int  # of the build of --growth; 0: none
    batch: int  # of the longest request decoded together with others
    omitted: list[str]  # what was left out, and why


def asked(options: BenchOptions, context: int) -> Asked:
    """Returns the lengths to measure. InputError for a given length that the context does not hold."""
    lengths, parts = Lengths(context, max(options.steps, STEPS) + 1), options.parts
    return Asked(
        lengths.several("--context", options.context, CONTEXTS) if "decode" in parts else (),
        lengths.several("--prefill", options.prefill, PREFILLS) if "prefill" in parts else (),
        lengths.one("--prefix", options.prefix, PREFIX),
        lengths.one("--length", options.length, GROWTH) if "growth" in parts else 0,
        min(context, BATCH) if options.context is None else max(lengths.several("--context", options.context, ())),
        lengths.omitted,
    )
