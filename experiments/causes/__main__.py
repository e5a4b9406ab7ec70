"""What makes the constructions differ: one kernel at a time, on one frozen bank (beyond the paper).

The same fixed prefixes are built incrementally and by prefill under every cell of linear kernel x attention kernel x
dtype, and both are continued. The four cells of {repeat_kv, blocked} x {plain, tiled} decide, by a fixed rule and per
dtype, which kernel is necessary and which is sufficient for divergence on this device; the other attention kernels
change one thing at a time. Where both kernels are batch-invariant, no tensor may differ: that is a gate. Beside the
cells: the drift of prefill in chunks, the distance of every arm to the same prefix in FP64, and how often an attention
kernel gives a query other bits alone than among others.

    python -m experiments.causes
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.drift import compare
from decode.greedy import Steps, suffix_steps
from decode.state import State
from experiments.causes.alone import rows_alone
from experiments.causes.cells import CELLS, DTYPES, Cell, cells
from experiments.causes.oracle import Oracle, oracle_entry
from experiments.causes.rules import causes_summary
from experiments.causes.tables import closing_lines
from experiments.harness.arms import Arm
from experiments.harness.bank import open_bank
from experiments.harness.bank_session import BankSession, bank_tasks, open_bank_session
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, source_option
from experiments.harness.panel import spread_record
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.runner import Plan, run_plan
from experiments.harness.tasks import Task
from experiments.harness.usable import left_out
from minimodel.bits import bits
from minimodel.checkpoint import open_checkpoint
from minimodel.decoder import Decoder
from stats.panels import length_spread

CHUNKS = (1, 2, 3, 4, 8, 16, 32, 64, 128)
GATES = ("functional_state", "storage_disjoint", "copies_synchronised", "argmax", "invariant_exact", "flip_caught")


def causes_row(
    model: Decoder, cell: Cell, task: Task, state: State, index: int, oracle: Oracle, progress: RowProgress
) -> Steps[dict[str, Any]]:
    """Both constructions under one cell, their suffixes, their drift, and their distance to the oracle."""
    progress.arm("oracle")  # made once a prefix, in whichever cell meets it first: no part of that cell's cost
    exact_boundary = oracle.at(state)
    model.numeric.apply()  # the oracle's contract was put in force
    progress.arm(cell.name)
    incremental = yield from incremental_steps(model, state)
    built = {"incremental": incremental, "prefill": build_prefill(model, state)}
    arms = []
    for name, boundary in built.items():
        suffix = yield from suffix_steps(model, boundary)
        arms.append(Arm(name, boundary, suffix))
    progress.fed(2 * len(state) + sum(len(arm.suffix.tokens) for arm in arms))
    pair = compare(built["incremental"].cache, built["prefill"].cache)
    exact = pair.exact and arms[0].suffix == arms[1].suffix
    gates = {"invariant_exact": exact or not cell.invariant, "flip_caught": flip_is_caught(built["prefill"])}
    extra: dict[str, Any] = {"cell": cell.name, "oracle": oracle_entry(built, exact_boundary)}
    progress.arm("chunks")
    if cell.chunked:
        extra["chunks"] = chunk_curve(model, built["incremental"], state)
    return row_entry(task, index, state, arms, [("incremental", "prefill")], gates, extra)


def flip_is_caught(boundary: Boundary) -> bool:
    """The negative control of every exactness verdict: one bit flipped in one V entry makes two caches differ there."""
    changed = boundary.cache.copy()
    layer, slot = changed.layers - 1, len(changed) // 2
    bits(changed.values(layer))[:, 0, slot, 0] ^= 1
    drift = compare(boundary.cache, changed)
    wanted = {"layer": layer, "tensor": "value", "position": slot}
    return drift.first_difference == wanted and drift.layers[layer][1].differing == boundary.cache.batch


def chunk_curve(model: Decoder, incremental: Boundary, state: State) -> dict[str, Any]:
    """Prefill in calls of c tokens against incremental: exact or not, share of elements, relative L2, by c."""
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


@dataclass(frozen=True)
class Crossing:
    """Every (cell, prefix) of a run, cells outermost, so that each cell's model is loaded once."""

    cells: list[Cell]
    tasks: list[Task]
    states: list[State]

    def at(self, index: int) -> tuple[Cell, Task, State]:
        cell, row = divmod(index, len(self.tasks))
        return self.cells[cell], self.tasks[row], self.states[row]

    def row_order(self) -> list[str]:
        return [f"{cell.name}/{task.id}" for cell in self.cells for task in self.tasks]


def causes_plan(session: BankSession, crossed: list[Cell], without: dict[str, str], rows: int) -> Plan:
    """Freezes the panel by length spread; answers and outcomes are not read. without: reasons by cell left out."""
    bank = session.bank
    prefixes = [bank.prefixes[i] for i in length_spread(bank.lengths(), min(rows, len(bank.prefixes)))]
    tasks, _, data = bank_tasks(session, prefixes)
    crossing = Crossing(crossed, tasks, session.states(prefixes))
    oracle = Oracle(session.models.checkpoint, session.options.device, session.options.threads)

    def decode(index: int, progress: RowProgress) -> Steps[dict[str, Any]]:
        cell, task, state = crossing.at(index)
        return causes_row(session.models.at(cell.name), cell, task, state, index, oracle, progress)

    names = [cell.name for cell in crossed]
    panel = {**spread_record(prefixes, rows, len(bank.prefixes)), "cells": names, "left_out": without}
    return Plan(
        manifest=session.manifest(crossing.row_order(), panel, data, tasks=str(session.options.tasks)),
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: crossing.at(index)[1],
        decode=decode,
        model=lambda index: session.models.at(crossing.at(index)[0].name),
        longest=session.longest(crossing.states),
        batch_size=session.options.batch_size,
        part=lambda index: crossing.at(index)[0].name,
        summarise=lambda found: causes_summary(found, names, panel, queries_alone(session, crossed)),
        closing=closing_lines,
        extra=lambda index: {"cell": crossing.at(index)[0].name},
    )


def queries_alone(session: BankSession, crossed: list[Cell]) -> dict[str, Any]:
    """`rows_alone` of every attention kernel that a dtype is crossed with."""
    config, found = session.models.checkpoint.config, {}
    for dtype in dict.fromkeys(cell.dtype for cell in crossed):
        mine = [cell for cell in crossed if cell.dtype == dtype]
        kernels = list(dict.fromkeys(cell.attention for cell in mine))
        found[dtype] = rows_alone(config, mine[0].numeric(session.options), kernels)
    return found


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
        session = open_bank_session("causes", options, [], bank, numeric=numeric)
        plan = causes_plan(session, crossed, without, rows if options.limit is None else min(rows, options.limit))
        return run_plan(plan, options.directory("causes"), options.fresh, options.quiet)

    run_command(body, "experiments.causes")


if __name__ == "__main__":
    main()
