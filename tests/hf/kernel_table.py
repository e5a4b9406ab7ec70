"""Which of our attention kernels has the bits of which transformers release: measured here, printed as Markdown.

Give a folder for each further release (`pip install --target FOLDER transformers==X`); the installed one comes last.
A cell names every kernel of ours that is equal in all bits: K and V of every layer, hidden states and logits of every
call; prefill is one call, decode is one token per call, so that neither holds anything of the other.

    python -m tests.hf.kernel_table FOLDER...
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from minimodel.load import load_model
from minimodel.numerics import DTYPES, NumericContract
from tests.hf import versions
from tests.hf.reference import Reference
from tests.hf.runs import CONTENT, CONTRACT, WIDE, Request, Run, differing, plain, run_ours, run_theirs, six_blocks
from tests.tiny import write_checkpoint

CALLS = {"prefill": "prefill", "decode": "incremental"}
HEAD = ("transformers", "its attention", "mask", "dtype", *CALLS)


def measure(threads: int) -> list[tuple[str, ...]]:
    """The rows of the installed release: its SDPA and eager attention, with the role mask and, for SDPA, with none."""
    rows = []
    for dtype in ("bf16", "fp32"):
        with tempfile.TemporaryDirectory() as folder:
            adapted = write_checkpoint(Path(folder) / "adapted", DTYPES[dtype], config=WIDE, contract=CONTRACT)
            stock = write_checkpoint(Path(folder) / "stock", DTYPES[dtype], config=WIDE, stock=True)
            fed = six_blocks(adapted, content=CONTENT)
            for directory, request, mask, attentions in (
                (adapted, fed, "roles", ("sdpa", "eager")),
                (stock, plain(288, fed.length), "none", ("sdpa",)),
            ):
                ours = our_runs(directory, request, dtype, threads)
                for attention in attentions:
                    reference, cells = Reference(directory, DTYPES[dtype], attention), []
                    for name, calls in CALLS.items():
                        theirs = run_theirs(reference, request, calls)
                        equal = [kernel for kernel, runs in ours.items() if not differing(runs[name], theirs)]
                        cells.append(", ".join(equal) or "none")
                    rows.append((versions.INSTALLED, attention, mask, dtype, *cells))
    return rows


def our_runs(directory: Path, request: Request, dtype: str, threads: int) -> dict[str, dict[str, Run]]:
    """The runs of each of our kernels that stands for a release, by kernel and kind of call."""
    models = {
        kernel: load_model(directory, NumericContract(dtype, attention=kernel, threads=threads))
        for kernel in ("eager", "repeat_kv", "packed_gqa")
    }
    return {
        kernel: {name: run_ours(model, request, calls) for name, calls in CALLS.items()}
        for kernel, model in models.items()
    }


def measured_under(folder: Path, threads: int) -> list[list[str]]:
    """The rows of another release, measured by a process that imports it."""
    if not (folder / "transformers").is_dir():
        raise click.BadParameter(f"{folder}: expected a folder with transformers in it, found none")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "tests.hf.kernel_table", "--json", "--threads", str(threads)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(f"{folder}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1, 1024), help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list instead.")
def main(folders: tuple[Path, ...], threads: int, as_json: bool) -> None:
    rows = [tuple(row) for folder in folders for row in measured_under(folder, threads)]
    rows += measure(threads)
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for row in rows:
        click.echo("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
