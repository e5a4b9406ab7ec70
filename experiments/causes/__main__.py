"""What makes the constructions differ: one kernel at a time, on one frozen bank (beyond the paper).

The same fixed prefixes are built incrementally and by prefill under every cell of linear kernel x attention kernel x
dtype, and both are continued. The four cells of {repeat_kv, blocked} x {plain, tiled} decide, by a fixed rule and per
dtype, which kernel is necessary and which is sufficient for divergence on this device; the other attention kernels
change one thing at a time. Where both kernels are batch-invariant, no tensor may differ: that is a gate. Beside the
cells: the drift of prefill in chunks, the distance of every arm to the same prefix in FP64, and how often an attention
kernel gives a query other bits alone than among others.

    python -m experiments.causes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.drift import compare
from decode.greedy import Steps
from decode.state import State
from experiments.causes.alone import rows_alone
from experiments.causes.cells import CELLS, DTYPES, Cell, cells
from experiments.causes.oracle import Oracle, oracle_entry
from experiments.causes.rules import causes_summary, closing_lines
from experiments.run.exits import run_command
from experiments.run.experiment import ArmExperiment, Arms, gate
from experiments.run.inputs import (
    BankSession,
    Models,
    bank_tasks,
    left_out,
    open_bank,
    open_bank_session,
    select_spread,
    spread_record,
)
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Panel, Row, RowExtra, Summary
from experiments.run.tasks import Task, longest_continuation
from minimodel.bits import bits
from minimodel.checkpoint import open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.numerics import NumericContract

CHUNKS = (1, 2, 3, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Causes(ArmExperiment):
    """Both constructions of every prefix under every cell, their suffixes, their drift, and their distance to FP64.

    Rows are (cell, prefix), cells outermost, so that each cell's model is loaded once.
    """

    models: Models  # by cell
    cells: Sequence[Cell]
    tasks: Sequence[Task]
    states: Sequence[State]  # the prefix of each task
    oracle: Oracle
    panel: Panel

    arms = ("incremental", "prefill")
    pairs = (("incremental", "prefill"),)

    @property
    def longest(self) -> int:
        return longest_continuation(self.states)

    def cell(self, index: int) -> Cell:
        return self.cells[index // len(self.tasks)]

    def state(self, index: int) -> State:
        return self.states[index % len(self.tasks)]

    def model(self, index: int) -> Decoder:
        return self.models.at(self.cell(index).name)

    def task(self, index: int) -> Task:
        return self.tasks[index % len(self.tasks)]

    def part(self, index: int) -> str:
        return self.cell(index).name

    def identity(self, index: int) -> RowExtra:
        return {"cell": self.cell(index).name}

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        model, state = self.model(index), self.state(index)
        progress.arm("oracle")  # made once per prefix, in whichever cell meets it first: no part of that cell's cost
        self.oracle.at(state)
        progress.arm("boundary")
        incremental = yield from incremental_steps(model, state)
        prefill = build_prefill(model, state)
        progress.fed(2 * len(state))
        return incremental, prefill

    def decode(self, index: int, progress: RowProgress) -> Steps[Arms]:
        made = yield from super().decode(index, progress)
        progress.arm("chunks")  # of `extra`: no part of the last suffix's cost
        return made

    @gate
    def invariant_exact(self, made: Arms) -> bool:
        """Where both kernels are batch-invariant, no bit of the caches or suffixes differs."""
        left, right = made.all
        exact = compare(left.boundary.cache, right.boundary.cache).exact and left.suffix == right.suffix
        return exact or not self.cell(made.index).invariant

    @gate
    def flip_caught(self, made: Arms) -> bool:
        return flip_is_caught(made["prefill"].boundary)

    def extra(self, made: Arms) -> RowExtra:
        cell, model = self.cell(made.index), self.model(made.index)
        built = {name: arm.boundary for name, arm in made.arms.items()}
        extra: RowExtra = {"cell": cell.name, "oracle": oracle_entry(built, self.oracle.at(made.state))}
        if cell.chunked:
            extra["chunks"] = chunk_curve(model, built["incremental"], made.state)
        return extra

    def summarise(self, rows: Sequence[Row]) -> Summary:
        contracts = [self.models.numeric[cell.name] for cell in self.cells]
        alone = queries_alone(self.models.checkpoint.config, contracts)
        return causes_summary(rows, [cell.name for cell in self.cells], self.panel, alone)

    def closing(self, summary: Summary) -> list[str]:
        return closing_lines(summary)


def flip_is_caught(boundary: Boundary) -> bool:
    """Whether one bit flipped in one V entry makes two caches differ there: the control of every exactness verdict."""
    changed = boundary.cache.copy()
    layer, slot = changed.layers - 1, len(changed) // 2
    bits(changed.values(layer))[:, 0, slot, 0] ^= 1
    drift = compare(boundary.cache, changed)
    wanted = {"layer": layer, "tensor": "value", "position": slot}
    return drift.first_difference == wanted and drift.layers[layer][1].differing == boundary.cache.batch


def chunk_curve(model: Decoder, incremental: Boundary, state: State) -> dict[str, Any]:
    """Compares prefill in calls of c tokens with incremental. Returns by c whether they are exact, the share of
    elements that differ, and the relative L2."""
    curve = {}
    for chunk in [c for c in CHUNKS if c < len(state)] + [len(state)]:
        entry = compare(incremental.cache, build_prefill(model, state, chunk=chunk).cache).as_dict()
        name = "one_call" if chunk == len(state) else str(chunk)
        curve[name] = {
            "exact": entry["exact"],
            "share": entry["differing"] / entry["elements"],
            "relative_l2": entry["relative_l2"],
        }
    return curve


def queries_alone(config: ModelConfig, contracts: Sequence[NumericContract]) -> dict[str, Any]:
    """Returns `rows_alone` of every attention kernel that a dtype is crossed with, by dtype."""
    found = {}
    for dtype in dict.fromkeys(one.dtype for one in contracts):
        mine = [one for one in contracts if one.dtype == dtype]
        found[dtype] = rows_alone(config, mine[0], list(dict.fromkeys(one.attention for one in mine)))
    return found


def run_causes(session: BankSession, crossed: list[Cell], without: dict[str, str], rows: int) -> int:
    """Freezes the panel by length spread and runs. without: why this machine cannot run a cell, by name."""
    options, bank = session.options, session.bank
    prefixes = select_spread(bank.prefixes, rows)
    tasks, _, data = bank_tasks(session, prefixes)
    states = session.states(prefixes)
    oracle = Oracle(session.models.checkpoint, options.device, options.threads)
    panel = spread_record(prefixes, rows, bank)
    panel |= {"cells": [cell.name for cell in crossed], "left_out": without}
    manifest = session.manifest([f"{cell.name}/{task.id}" for cell in crossed for task in tasks], panel, data)
    causes = Causes(session.models, crossed, tasks, states, oracle, panel)
    return run(causes, manifest, options, options.directory("causes"))


@click.command(help=__doc__)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=DTYPES,
    show_default=True,
    type=click.Choice(DTYPES),
    help="May be repeated.",
)
@click.option(
    "--cell",
    "named",
    multiple=True,
    type=click.Choice(CELLS),
    metavar="ATTENTION/LINEAR",
    help=f"Only these kernels; may be repeated. Of {', '.join(CELLS)}. [default: all]",
)
@click.option("--rows", default=12, show_default=True, type=click.IntRange(min=1), help="Prefixes, by length spread.")
@source_option("matrix", "matrix-bf16")
@common_options(preflight=0)
def main(options: RunOptions, dtypes: tuple[str, ...], named: tuple[str, ...], rows: int, source: Path) -> None:
    def body() -> int:
        bank = open_bank(source)
        numeric = {cell.name: cell.numeric(options) for cell in cells(dtypes) if cell.kernels in (named or CELLS)}
        without = left_out(numeric, open_checkpoint(options.checkpoint).config, "experiments.causes")
        crossed = [cell for cell in cells(dtypes) if cell.name in numeric and cell.name not in without]
        numeric = {cell.name: numeric[cell.name] for cell in crossed}
        session = open_bank_session("causes", options, bank, numeric)
        return run_causes(session, crossed, without, rows if options.limit is None else min(rows, options.limit))

    run_command(body, "experiments.causes")


if __name__ == "__main__":
    main()
