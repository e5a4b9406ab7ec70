"""Retained-live four-arm matrix (paper, experiment 1): live, its replica, prefill, its replica, on every row.

The boundary is generated once per row. Four storage-isolated continuations follow under one suffix decoder: the
retained live cache and a bit-exact copy, a one-call prefill of the same tokens and a second, independent call. Prefill
against live is the comparison; the replica pairs are its floor and its gate.

    python -m experiments.matrix --dtype bf16
"""

import click

from cache.storage import Provenance
from experiments.run.designs import RetainedLive
from experiments.run.inputs import open_session
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option
from experiments.run.saving import Saving, require_room, saving_options


@click.command(help=__doc__)
@dtype_option
@saving_options
@common_options("matrix", preflight=8)
def main(
    options: RunOptions, dtype: str, save_boundaries: bool, traced: tuple[str, ...], trace_last: int | None
) -> int:
    session = open_session("matrix", options, {dtype: options.numeric(dtype)})
    out = options.directory(f"matrix-{dtype}")
    tasks, prompts, data = session.tasks(options.limit)
    order, checkpoint, numeric = [task.id for task in tasks], session.models.checkpoint, session.models.numeric[dtype]
    saving = Saving.chosen(
        out, save_boundaries, traced, trace_last, order, lambda: Provenance.here(checkpoint, numeric)
    )
    if traced:
        longest = max(prompt.contract.prefix_limit(len(prompt)) for prompt in prompts)
        require_room(checkpoint.config, dtype, min(trace_last or longest, longest))
    matrix = RetainedLive(session.models.at(dtype), tasks, prompts, saving)
    return run(matrix, session.manifest(order, tasks_bytes=data), options, out)


if __name__ == "__main__":
    main()
