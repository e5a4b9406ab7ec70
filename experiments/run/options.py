"""The options every experiment shares, and the numeric contract they spell.

The manifest: everything that decides a row's bits, written before the first row and compared on resume.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from decode.contract import Contract
from experiments.run.exits import claim_devices
from experiments.run.records import ContractEntries, Manifest, Panel
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import COPIES
from minimodel.checkpoint import Checkpoint, file_digests
from minimodel.errors import InputError
from minimodel.linear import LINEAR_KERNELS
from minimodel.machine import machine_record
from minimodel.numerics import DEFAULT_THREADS, DTYPES, KERNELS, NumericContract
from stats.donors import LEAST_DIVERGENT, LEAST_EXACT, PRECEDENCE
from stats.intervals import BLOCK, REPLICATES, UNCERTAINTY

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


SCHEMA = "stage-replay-run-v1"
ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("minimodel", "decode", "cache", "stats", "experiments")
# under experiments/: what reads runs, prepares inputs or starts commands, and so decides no row and no verdict
NO_ROWS = (
    *("adapt", "benchmark", "crosscheck", "demo", "plan", "prepare", "published", "report"),
    *("__main__.py", "launch.py", "machine.py", "paired.py", "show.py", "study.py"),
)


def build_manifest(
    experiment: str,
    numeric: list[NumericContract],
    checkpoint: Checkpoint,
    contract: Contract | None,
    tasks_bytes: bytes | None,
    row_order: list[str],
    preflight: int,
    panel: Panel | None = None,
    information: dict[str, Any] | None = None,
) -> Manifest:
    """numeric: one contract a dtype of the run, in order; `apply` is called on each to record what it puts in force.
    contract: None for a stock checkpoint. tasks_bytes: the task file's, None for an experiment that reads none.
    """
    entries: ContractEntries = {} if contract is None else contract_entries(contract)
    records = []
    for one in numeric:
        one.apply()
        records.append(one.record())
    dtypes = dict.fromkeys(one.torch_dtype for one in numeric)
    casts = [line for dtype in dtypes for line in checkpoint.cast_warnings(dtype)]
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "numeric": records,
        "environment": machine_record(),
        "code_sha256": code_sha256(),
        "checkpoint": file_digests(checkpoint),
        "checkpoint_warnings": [*checkpoint.warnings, *casts],
        "tasks_sha256": None if tasks_bytes is None else hashlib.sha256(tasks_bytes).hexdigest(),
        **entries,
        "preflight": preflight,
        "plan": plan_record(),
        "panel": panel or {},
        "row_order": row_order,
        "information": {
            "checkpoint": str(checkpoint.directory),
            "command": sys.argv[1:],
            **git_state(),
            **(information or {}),
        },
    }


def contract_entries(contract: Contract) -> ContractEntries:
    """Returns what a manifest keeps of the decoding contract."""
    return {
        "tokens": contract.meaning(),
        "caps": {"branch": contract.caps[1], "merge": contract.caps[4], "answer": contract.caps[5]},
        "visibility": [list(row) for row in contract.rules.visibility],
        "role_offset": contract.rules.role_offset,
    }


def plan_record() -> dict[str, Any]:
    """Returns what is frozen before the first row, whatever the rows will say: the uncertainty of every endpoint, the
    interpretation of a replication, and greedy decoding. The selection rule and its rows stand in `panel`."""
    return {
        "uncertainty": {**UNCERTAINTY, "bootstrap_replicates": REPLICATES, "bootstrap_block": BLOCK},
        "interpretation": {
            "precedence": list(PRECEDENCE),
            "least_divergent": LEAST_DIVERGENT,
            "least_exact": LEAST_EXACT,
        },
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
    paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    without = {root / "experiments" / name for name in NO_ROWS}
    return [path for path in paths if without.isdisjoint({path, *path.parents})]


def git_state() -> dict[str, Any]:
    """Returns commit and dirty flag of the source tree; nulls where it is no git checkout of its own.

    A package installed below somebody else's repository lies in that repository's tree and is not a part of it: the
    commit counts only where the repository's top is this tree's own root.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return {"git_commit": None, "git_dirty": None}
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if status is None else bool(status)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
