"""The options every experiment shares, and the numeric contract they spell."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.run.ranks import claim_devices
from minimodel.attention import ATTENTION_KERNELS
from minimodel.errors import InputError
from minimodel.linear import LINEAR_KERNELS
from minimodel.numerics import DEFAULT_THREADS, DTYPES, KERNELS, NumericContract

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
DEMO = Path(__file__).resolve().parent.parent / "demo"


@dataclass(frozen=True)
class RunOptions:
    """What the command line said. `tasks` None: the command reads none. `out` None: runs/NAME-DTYPE. `limit` None: all
    rows. `batch_size` None: as many as keep their bits.
    """

    checkpoint: Path
    tasks: Path | None
    out: Path | None
    limit: int | None
    preflight: int
    device: str
    threads: int
    kernels: str
    attention: str
    linear: str
    reduced_precision: bool
    batch_size: int | None
    fresh: bool
    quiet: bool

    def numeric(self, dtype: str) -> NumericContract:
        return NumericContract(
            dtype, self.device, self.kernels, self.attention, self.linear, self.threads, self.reduced_precision
        )

    def directory(self, name: str) -> Path:
        """The run directory: --out, or runs/NAME under the working directory."""
        return self.out if self.out is not None else Path("runs") / name


def _claimed(context: click.Context, option: click.Parameter, device: str) -> str:
    """The device as given, once a rank of a job has made its own CUDA devices the only ones it sees."""
    try:
        claim_devices(device, os.environ)
    except InputError as error:
        raise click.BadParameter(str(error)) from None
    return device


DEVICE = click.option(
    "--device",
    "--devices",
    "device",
    default="cpu",
    show_default=True,
    callback=_claimed,
    metavar="DEVICE[,DEVICE...]",
    help="cpu, cuda or cuda:N; over several, decoder layers are placed evenly and in order. Under torchrun each local "
    "rank has CUDA devices of its own, counted from cuda:0.",
)
THREADS = click.option(
    "--threads",
    default=DEFAULT_THREADS,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="CPU threads; the count can move bits, so it is fixed and recorded.",
)
KERNEL_OPTIONS = (
    click.option(
        "--kernels",
        default="repeat_kv",
        show_default=True,
        type=click.Choice(list(KERNELS)),
        help="Attention and linear kernel in short form.",
    ),
    click.option(
        "--attention",
        default="",
        type=click.Choice(["", *ATTENTION_KERNELS]),
        metavar="KERNEL",
        help=f"Overrides the attention kernel of --kernels. Of {', '.join(ATTENTION_KERNELS)}.",
    ),
    click.option(
        "--linear",
        default="",
        type=click.Choice(["", *LINEAR_KERNELS]),
        metavar="KERNEL",
        help=f"Overrides the linear kernel of --kernels. Of {', '.join(LINEAR_KERNELS)}.",
    ),
)
REDUCED_PRECISION = click.option(
    "--reduced-precision/--no-reduced-precision",
    default=True,
    show_default=True,
    help="CUDA only: let BF16 and FP16 products add partial sums in their own dtype, torch's default and the paper's.",
)
BATCH_SIZE = click.option(
    "--batch-size",
    type=click.IntRange(min=1, max=64),
    default=None,
    metavar="K",
    help="Rows decoded together; no byte of rows.jsonl depends on it. [default: as many, up to 16, as were checked at "
    "the start to keep every bit here]",
)
TASKS = click.option(
    "--tasks",
    type=click.Path(path_type=Path),
    default=DEMO / "tasks.jsonl",
    show_default="the bundled demo's",
    metavar="FILE",
    help="JSON lines: id, question, choices, answer.",
)
LIMIT = click.option("--limit", type=click.IntRange(min=1), default=None, metavar="N", help="Only the first N rows.")
FRESH = click.option("--fresh", is_flag=True, help="Set an old run aside as DIR.N and start anew.")
QUIET = click.option("--quiet", is_flag=True, help="No progress on stderr.")


def checkpoint_option(name: str = "primary") -> Decorator:
    """--checkpoint; by default the demo's checkpoint `name`."""
    return click.option(
        "--checkpoint",
        type=click.Path(path_type=Path),
        default=DEMO / name,
        show_default=f"the bundled demo's {name}",
        metavar="DIR",
        help="An adapted checkpoint directory.",
    )


def out_option(default: str = "NAME-DTYPE") -> Decorator:
    """--out; `default` says in the help which directory under runs/ it is without."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=None,
        metavar="DIR",
        help=f"The run directory. [default: runs/{default}]",
    )


def preflight_option(rows: int) -> Decorator:
    """--preflight, by default so many rows."""
    return click.option(
        "--preflight",
        type=click.IntRange(min=0),
        default=rows,
        show_default=True,
        metavar="N",
        help="The first N rows must pass every gate, or the run stops there.",
    )


def with_options(command: Command, options: Sequence[Decorator]) -> Command:
    """The command with the options, listed in that order by --help."""
    for option in reversed(options):
        command = option(command)
    return command


def numeric_options(command: Command) -> Command:
    """--device or --devices, --threads, --kernels, --attention, --linear, --reduced-precision."""
    return with_options(command, [DEVICE, THREADS, *KERNEL_OPTIONS, REDUCED_PRECISION])


def common_options(preflight: int, checkpoint: str = "primary", tasks: bool = True) -> Decorator:
    """All shared options but --dtype; the command receives them as one `options: RunOptions`. tasks: offer --tasks."""

    def decorate(command: Command) -> Command:
        def wrapped(**given: Any) -> Any:
            shared = {name: given.pop(name, None) for name in RunOptions.__dataclass_fields__}
            return command(options=RunOptions(**shared), **given)

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        inputs = [checkpoint_option(checkpoint), *((TASKS,) if tasks else ()), out_option(), LIMIT]
        numeric = [DEVICE, THREADS, *KERNEL_OPTIONS, REDUCED_PRECISION, BATCH_SIZE]
        return with_options(wrapped, [QUIET, FRESH, *numeric, *inputs, preflight_option(preflight)])

    return decorate


def source_option(experiment: str, default: str) -> Decorator:
    """--source: the finished run that this experiment starts from."""
    return click.option(
        "--source",
        type=click.Path(path_type=Path),
        default=Path("runs") / default,
        show_default=True,
        metavar="DIR",
        help=f"A finished {experiment} run.",
    )


def dtype_option(command: Command) -> Command:
    """--dtype, required: nothing about the numbers is guessed."""
    return click.option(
        "--dtype", required=True, type=click.Choice(list(DTYPES)), help="Dtype of weights, K/V and logits."
    )(command)
