"""The options that every experiment shares, the numeric contract they give, and the parts of a manifest that follow
from neither rows nor inputs: the decoding contract, the frozen plan, the code."""

import hashlib
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from cache.storage import contract_record
from decode.contract import Contract
from experiments.run.exits import as_command, claim_devices
from experiments.run.records import ContractEntries
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import COPIES
from minimodel.linear import LINEAR_KERNELS
from minimodel.numerics import DEFAULT_THREADS, DTYPES, KERNELS, NumericContract
from stats.donors import LEAST_DIVERGENT, LEAST_EXACT, PRECEDENCE
from stats.intervals import BLOCK, REPLICATES, UNCERTAINTY

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
DEMO = Path(__file__).resolve().parent.parent / "demo"
SCHEMA = "stage-replay-run-v1"
ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("minimodel", "decode", "cache", "stats", "experiments")
# under experiments/: what reads runs, prepares inputs or starts commands, and so decides no row and no verdict
NO_ROWS = (
    *("adapt", "benchmark", "crosscheck", "demo", "plan", "prepare", "published", "report"),
    *("__main__.py", "launch.py", "machine.py", "paired.py", "show.py", "study.py"),
)


@dataclass(frozen=True)
class RunOptions:
    """The command line."""

    checkpoint: Path
    tasks: Path | None  # None: the command reads none
    out: Path | None  # None: runs/NAME-DTYPE
    limit: int | None  # None: all rows
    preflight: int
    device: str
    threads: int
    kernels: str
    attention: str
    linear: str
    reduced_precision: bool
    batch_size: int | None  # None: as many as keep their bits
    fresh: bool
    quiet: bool

    def numeric(self, dtype: str) -> NumericContract:
        return NumericContract(
            dtype, self.device, self.kernels, self.attention, self.linear, self.threads, self.reduced_precision
        )

    def directory(self, name: str) -> Path:
        """Returns the run directory: --out, or runs/NAME under the working directory."""
        return self.out if self.out is not None else Path("runs") / name


class PathOption(click.Path):
    """A path. The empty text, which an unset shell variable leaves, is refused: it would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected a path, found an empty text; . is the working directory", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds. NaN is refused: it lies within any, as no comparison with it holds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, found {number}", param, ctx)
        return number


PATH = PathOption(path_type=Path)
_count = partial(click.option, default=None, metavar="N")
_path = partial(click.option, type=PATH)
DEVICE = click.option(
    "--device",
    "--devices",
    "device",
    default="cpu",
    show_default=True,
    metavar="DEVICE[,DEVICE...]",
    help="cpu, cuda or cuda:N; over several, decoder layers are placed evenly and in order. Under torchrun each local "
    "rank has its share of the CUDA devices, counted from cuda:0.",
)
THREADS = click.option(
    "--threads",
    default=DEFAULT_THREADS,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="CPU threads; the count can move bits, so it is fixed and recorded.",
)
NUMERIC = (
    DEVICE,
    THREADS,
    click.option(
        "--kernels",
        default="repeat_kv",
        show_default=True,
        type=click.Choice(list(KERNELS)),
        help="Attention and linear kernel in short form.",
    ),
    *(
        click.option(
            f"--{part}",
            default="",
            type=click.Choice(["", *names]),
            metavar="KERNEL",
            help=f"Overrides the {part} kernel of --kernels. Of {', '.join(names)}.",
        )
        for part, names in (("attention", ATTENTION_KERNELS), ("linear", LINEAR_KERNELS))
    ),
    click.option(
        "--reduced-precision/--no-reduced-precision",
        default=True,
        show_default=True,
        help="CUDA only: let BF16 and FP16 products add partial sums in their own dtype, torch's default and the "
        "paper's.",
    ),
)
BATCH_SIZE = click.option(
    "--batch-size",
    type=click.IntRange(min=1, max=64),
    default=None,
    metavar="K",
    help="Rows decoded together; no byte of rows.jsonl depends on it. [default: as many, up to 16, as were checked at "
    "the start to keep every bit here]",
)
TASKS = _path(
    "--tasks",
    default=DEMO / "tasks.jsonl",
    show_default="the bundled demo's",
    metavar="FILE",
    help="JSON lines: id, question, choices, answer.",
)
LIMIT = _count("--limit", type=click.IntRange(min=1), help="Only the first N rows.")
FRESH = click.option("--fresh", is_flag=True, help="Set an old run aside as DIR.N and start anew.")
QUIET = click.option("--quiet", is_flag=True, help="No progress on stderr.")
dtype_option = click.option(  # required: nothing about the numbers is guessed
    "--dtype", required=True, type=click.Choice(list(DTYPES)), help="Dtype of weights, K/V and logits."
)


def dtypes_option(names: Sequence[str], default: Sequence[str], text: str) -> Decorator:
    """Returns --dtype, which may be repeated."""
    kind = click.Choice(names)
    return click.option("--dtype", "dtypes", multiple=True, default=default, show_default=True, type=kind, help=text)


def checkpoint_option(name: str = "primary") -> Decorator:
    """Returns --checkpoint, by default the demo's checkpoint `name`."""
    shown, text = f"the bundled demo's {name}", "An adapted checkpoint directory."
    return _path("--checkpoint", default=DEMO / name, show_default=shown, metavar="DIR", help=text)


def out_option(default: str = "NAME-DTYPE") -> Decorator:
    """Returns --out. default: the directory under runs/, shown in --help."""
    return _path("--out", default=None, metavar="DIR", help=f"The run directory. [default: runs/{default}]")


def preflight_option(rows: int) -> Decorator:
    """Returns --preflight, by default so many rows."""
    text = "The first N rows must pass every gate, or the run stops there."
    return _count("--preflight", type=click.IntRange(min=0), default=rows, show_default=True, help=text)


def source_option(experiment: str, default: str) -> Decorator:
    """Returns --source, the finished run that this experiment starts from."""
    text = f"A finished {experiment} run."
    return _path("--source", default=Path("runs") / default, show_default=True, metavar="DIR", help=text)


def with_options(command: Command, options: Sequence[Decorator]) -> Command:
    """Returns the command with the options, listed in that order by --help."""
    for option in reversed(options):
        command = option(command)
    return command


def common_options(name: str, preflight: int = 0, checkpoint: str = "primary", tasks: bool = True) -> Decorator:
    """Adds all shared options but --dtype to the command experiments.NAME. It receives them as one
    `options: RunOptions` and returns its exit code. tasks: offer --tasks."""

    def decorate(command: Command) -> Command:
        @as_command(f"experiments.{name}", resumes=True, ranks=True)
        @wraps(command)
        def main(**given: Any) -> int:
            shared = RunOptions(**{name: given.pop(name, None) for name in RunOptions.__dataclass_fields__})
            claim_devices(shared.device, os.environ)
            return int(command(options=shared, **given))

        inputs = [checkpoint_option(checkpoint), *((TASKS,) if tasks else ()), out_option(), LIMIT]
        return with_options(main, [QUIET, FRESH, *NUMERIC, BATCH_SIZE, *inputs, preflight_option(preflight)])

    return decorate


def contract_entries(contract: Contract) -> ContractEntries:
    """Returns what a manifest keeps of the decoding contract."""
    record = contract_record(contract)
    _, branch, _, _, merge, answer = record["caps"]
    return {
        "tokens": contract.meaning(),
        "caps": {"branch": branch, "merge": merge, "answer": answer},
        "visibility": record["visibility"],
        "role_offset": record["role_offset"],
    }


def plan_record() -> dict[str, Any]:
    """Returns what is frozen before the first row, whatever the rows will say: the uncertainty of every endpoint, the
    interpretation of a replication, and greedy decoding. The selection rule and its rows stand in `panel`."""
    rule = {"precedence": list(PRECEDENCE), "least_divergent": LEAST_DIVERGENT, "least_exact": LEAST_EXACT}
    return {
        "uncertainty": {**UNCERTAINTY, "bootstrap_replicates": REPLICATES, "bootstrap_block": BLOCK},
        "interpretation": rule,
        "decode": {"greedy": True, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "ties": "lowest id", "copies": COPIES},
    }


def code_sha256() -> str:
    """Returns the digest, over names and contents, of the source files that decide a row's bits or its verdict."""
    digest = hashlib.sha256()
    for path in deciding_files(ROOT):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def deciding_files(root: Path) -> list[Path]:
    """Returns the product's modules without those that only read runs, prepare inputs or start commands."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    without = {root / "experiments" / name for name in NO_ROWS}
    return [path for path in paths if without.isdisjoint({path, *path.parents})]


def git_state() -> dict[str, Any]:
    """Returns commit and dirty flag of the source tree; nulls where its root is not that of a git checkout.

    The commit counts only where the repository's top is this tree's own root: a package installed below another
    repository is not a part of it.
    """

    def git(*arguments: str) -> str:
        words = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
            return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"git_commit": None, "git_dirty": None}
