"""The options every experiment shares, and the numeric contract they spell."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from minimodel.attention import ATTENTION_KERNELS
from minimodel.linear import LINEAR_KERNELS
from minimodel.numerics import DEFAULT_THREADS, DTYPES, KERNELS, NumericContract

DEMO = Path(__file__).resolve().parent.parent / "demo"


@dataclass(frozen=True)
class RunOptions:
    """What the command line said. `tasks` None: the command reads none. `out` None: runs/NAME-DTYPE. `limit` None: all
    rows.
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
    fresh: bool
    quiet: bool

    def numeric(self, dtype: str) -> NumericContract:
        return NumericContract(dtype, self.device, self.kernels, self.attention, self.linear, self.threads)

    def directory(self, name: str) -> Path:
        """The run directory: --out, or runs/NAME under the working directory."""
        return self.out if self.out is not None else Path("runs") / name


def numeric_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--device, --threads, --kernels, --attention, --linear."""
    for option in reversed(
        [
            click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
            click.option(
                "--threads",
                default=DEFAULT_THREADS,
                show_default=True,
                type=click.IntRange(1, 1024),
                help="CPU threads; the count can move bits, so it is fixed and recorded.",
            ),
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
                help="Overrides the attention kernel of --kernels.",
            ),
            click.option(
                "--linear",
                default="",
                type=click.Choice(["", *LINEAR_KERNELS]),
                help="Overrides the linear kernel of --kernels.",
            ),
        ]
    ):
        command = option(command)
    return command


def common_options(
    preflight: int, checkpoint: str = "primary", tasks: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """All shared options but --dtype; the command receives them as one `options: RunOptions`. tasks: offer --tasks."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(**given: Any) -> Any:
            shared = {name: given.pop(name, None) for name in RunOptions.__dataclass_fields__}
            return command(options=RunOptions(**shared), **given)

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        directory = click.Path(path_type=Path)
        for option in reversed(
            [
                click.option(
                    "--checkpoint",
                    type=directory,
                    default=DEMO / checkpoint,
                    show_default=f"the bundled demo's {checkpoint}",
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
                )
                if tasks
                else _no_option,
                click.option(
                    "--out",
                    type=directory,
                    default=None,
                    metavar="DIR",
                    help="The run directory. [default: runs/NAME-DTYPE]",
                ),
                click.option(
                    "--limit", type=click.IntRange(min=1), default=None, metavar="N", help="Only the first N rows."
                ),
                click.option(
                    "--preflight",
                    type=click.IntRange(min=0),
                    default=preflight,
                    show_default=True,
                    metavar="N",
                    help="The first N rows must pass every gate, or the run stops there.",
                ),
            ]
        ):
            wrapped = option(wrapped)
        wrapped = numeric_options(wrapped)
        wrapped = click.option("--fresh", is_flag=True, help="Set an old run aside as DIR.N and start anew.")(wrapped)
        return click.option("--quiet", is_flag=True, help="No progress on stderr.")(wrapped)

    return decorate


def _no_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return command


def source_option(experiment: str, default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--source: the finished run that this experiment starts from."""
    return click.option(
        "--source",
        type=click.Path(path_type=Path),
        default=Path("runs") / default,
        show_default=True,
        metavar="DIR",
        help=f"A finished {experiment} run.",
    )


def dtype_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--dtype, required: nothing about the numbers is guessed."""
    return click.option(
        "--dtype", required=True, type=click.Choice(list(DTYPES)), help="Dtype of weights, K/V and logits."
    )(command)
