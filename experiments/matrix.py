"""Retained-live four-arm matrix (paper, experiment 1): live, its replica, prefill, its replica, on every row.

The boundary is generated once per row. Four storage-isolated continuations follow under one suffix decoder: the
retained live cache and a bit-exact copy, a one-call prefill of the same tokens and a second, independent call. Prefill
against live is the comparison; the replica pairs are its floor and its gate.

    python -m experiments.matrix --dtype bf16
"""

from pathlib import Path

import click

from cache.storage import Provenance
from experiments.run.designs import RetainedLive
from experiments.run.inputs import Session, open_session
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option
from experiments.run.saving import Saving, require_room, saving_options


def open_saving(session: Session, out: Path, boundaries: bool, traced: tuple[str, ...], last: int | None) -> Saving:
    """Returns what the run writes beside its ledger. InputError before the first row where it cannot be written."""
    numeric, order = session.numeric, [task.id for task in session.tasks]
    saving = Saving.chosen(out, boundaries, traced, last, order, lambda: Provenance.here(session.checkpoint, numeric))
    longest = max((session.contract.prefix_limit(len(prompt)) for prompt in session.prompts), default=0)
    if traced:
        require_room(session.model.config, numeric.dtype, min(last or longest, longest))
    return saving


@click.command(help=__doc__)
@dtype_option
@saving_options
@common_options("matrix", preflight=8)
def main(
    options: RunOptions, dtype: str, save_boundaries: bool, traced: tuple[str, ...], trace_last: int | None
) -> int:
    session, out = open_session("matrix", options, dtype), options.directory(f"matrix-{dtype}")
    saving = open_saving(session, out, save_boundaries, traced, trace_last)
    matrix = RetainedLive(session.model, session.tasks, session.prompts, saving)
    return run(matrix, session.manifest(), options, out)


if __name__ == "__main__":
    main()
