"""Retained-live four-arm matrix (paper, experiment 1): live, its replica, prefill, its replica, on every row.

The boundary is generated once a row. Four storage-isolated continuations follow under one suffix decoder: the retained
live cache and a bit-exact copy, a one-call prefill of the same tokens and a second, independent call. Prefill against
live is the comparison; the replica pairs are its floor and its gate.

    python -m experiments.matrix --dtype bf16
"""

from pathlib import Path
from typing import Any

import click

from cache.build import build_prefill, live_steps
from cache.storage import Provenance
from decode.greedy import Steps
from decode.state import State
from experiments.harness.arms import continued, replica_exact
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.runner import Plan, run_plan
from experiments.harness.saving import Saving, saving_options
from experiments.harness.session import Session, open_session
from experiments.harness.summary import pair_summary, run_summary
from experiments.harness.tasks import Task, longest_row
from experiments.harness.trace import require_room
from experiments.report.closing import closing_line
from minimodel.decoder import Decoder
from stats.intervals import STREAMS

ARMS = ("live", "live_replica", "prefill", "prefill_replica")
PAIRS = [("live", "live_replica"), ("prefill", "prefill_replica"), ("live", "prefill")]
GATES = ("replica_live", "replica_prefill", "functional_state", "storage_disjoint", "copies_synchronised", "argmax")


def matrix_row(
    model: Decoder, task: Task, prompt: State, index: int, progress: RowProgress, saving: Saving
) -> Steps[dict[str, Any]]:
    """Decodes one row: the boundary once, then four arms."""
    progress.arm("boundary")
    live = yield from live_steps(model, prompt, observe=saving.observe(task.id, "live"))
    progress.fed(len(live.state))
    prefill = build_prefill(model, live.state, observe=saving.observe(task.id, "prefill"))
    saving.write(task.id, "live", live)
    saving.write(task.id, "prefill", prefill)
    # a live boundary's replica is a copy; a prefill's is a second call of the model
    boundaries = dict(zip(ARMS, (live, live.replica(), prefill, prefill.replica())))
    arms = yield from continued(model, boundaries, progress)
    gates = {"replica_live": replica_exact(arms[0], arms[1]), "replica_prefill": replica_exact(arms[2], arms[3])}
    return row_entry(task, index, live.state, arms, PAIRS, gates, {"prefix_margins": list(live.margins)})


def matrix_summary(dtype: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The endpoints of live against prefill. Bootstrap streams of the paper's plan: BF16 0, all others FP32's, 1."""
    stream = STREAMS["matched_bf16" if dtype == "bf16" else "matched_fp32"]
    return run_summary("matrix", dtype, rows, pair_summary(rows, "live", "prefill", stream))


def open_saving(session: Session, out: Path, boundaries: bool, traced: tuple[str, ...], last: int | None) -> Saving:
    """What the run writes beside its ledger, refused before the first row where it cannot be written."""
    numeric, order = session.numeric, [task.id for task in session.tasks]
    saving = Saving.chosen(out, boundaries, traced, last, order, lambda: Provenance.here(session.checkpoint, numeric))
    longest = max((session.contract.prefix_limit(len(prompt)) for prompt in session.prompts), default=0)
    if traced:
        require_room(session.model.config, numeric.dtype, min(last or longest, longest))
    return saving


def _unwritten(out: Path, missing: list[str]) -> list[str]:
    if not missing:
        return []
    more = f" and {len(missing) - 1} more were" if len(missing) > 1 else " was"
    return [f"{out}: {missing[0]}{more} not written, the rows being kept from before; use --fresh or another --out"]


@click.command(help=__doc__)
@dtype_option
@saving_options
@common_options(preflight=8)
def main(
    options: RunOptions, dtype: str, save_boundaries: bool, traced: tuple[str, ...], trace_last: int | None
) -> None:
    def body() -> int:
        session = open_session("matrix", options, dtype)
        out = options.directory(f"matrix-{dtype}")
        saving = open_saving(session, out, save_boundaries, traced, trace_last)
        plan = Plan(
            manifest=session.manifest(),
            preflight=options.preflight,
            gates=GATES,
            task=lambda index: session.tasks[index],
            decode=lambda i, progress: matrix_row(
                session.model, session.tasks[i], session.prompts[i], i, progress, saving
            ),
            model=lambda index: session.model,
            longest=longest_row(session.contract, session.prompts),
            batch_size=options.batch_size,
            summarise=lambda rows: matrix_summary(dtype, rows),
            closing=lambda summary: [closing_line(summary)],
            notes=lambda: _unwritten(out, saving.missing([task.id for task in session.tasks], ("live", "prefill"))),
        )
        return run_plan(plan, out, options.fresh, options.quiet)

    run_command(body, "experiments.matrix")


if __name__ == "__main__":
    main()
