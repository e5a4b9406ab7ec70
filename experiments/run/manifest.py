"""The manifest: everything that decides a row's bits, written before the first row and compared on resume."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode.contract import Contract
from experiments.run.records import ContractEntries, Manifest, Panel
from minimodel.bits import COPIES
from minimodel.checkpoint import Checkpoint, file_digests
from minimodel.machine import machine_record
from minimodel.numerics import NumericContract
from stats.donors import LEAST_DIVERGENT, LEAST_EXACT, PRECEDENCE
from stats.intervals import BLOCK, REPLICATES, UNCERTAINTY

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
