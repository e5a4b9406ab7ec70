"""The retained-live matrix computed by transformers, written as the ledger that `experiments.matrix` writes.

Same tasks, contract, structural mask, greedy rule and batch of two; embedding, decoder, DynamicCache and SDPA are
transformers'. Hold the two runs against each other with `python -m experiments.crosscheck`; transformers from 5.23 on
has the bits of our `--kernels packed_gqa`, earlier releases those of `repeat_kv`.

    python -m tests.hf.record --dtype bf16 --out runs/transformers-bf16
"""

import hashlib
from pathlib import Path
from typing import Any

import click

from cache.storage import Provenance
from decode.contract import Contract
from decode.greedy import Steps
from decode.state import State
from experiments.harness.arms import Arm, replica_exact
from experiments.harness.exits import run_command
from experiments.harness.manifest import build_manifest
from experiments.harness.options import dtype_option
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.runner import Plan, run_plan
from experiments.harness.saving import Saving, saving_options
from experiments.harness.tasks import Task, load_tasks, prompt_states
from experiments.harness.trace import require_room
from experiments.matrix import ARMS, GATES, PAIRS, matrix_summary
from experiments.report.closing import closing_line
from minimodel.checkpoint import open_checkpoint
from minimodel.errors import refuse
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable
from tests.hf import versions
from tests.hf.record_options import RecordOptions, record_options
from tests.hf.recording import (
    Recorded,
    record_incremental,
    record_live,
    record_prefill,
    record_suffix,
    replica,
    require_disjoint,
)
from tests.hf.reference import Reference

SOURCE = f"transformers {versions.INSTALLED}"
MORE_ARMS = ("incremental", "incremental_replica")
MORE_PAIRS = [("incremental", "incremental_replica"), ("live", "incremental"), ("incremental", "prefill")]


def record_row(
    reference: Reference,
    task: Task,
    prompt: State,
    index: int,
    progress: RowProgress,
    saving: Saving,
    incremental: bool,
) -> dict[str, Any]:
    """One row, field for field as `experiments.matrix` writes it; `incremental` adds its two arms and comparisons."""
    progress.arm("boundary")
    live = record_live(reference, prompt, saving.observe(task.id, "live"))
    state = live.boundary.state
    prefill = record_prefill(reference, state, saving.observe(task.id, "prefill"))
    made = dict(zip(ARMS, (live, replica(live), prefill, record_prefill(reference, state))))
    if incremental:
        again = record_incremental(reference, state, saving.observe(task.id, "incremental"))
        made.update(zip(MORE_ARMS, (again, replica(again))))
    for name in ("live", "prefill", "incremental"):
        if name in made:
            saving.write(task.id, name, made[name].boundary)
    require_disjoint(list(made.values()))
    progress.fed(len(state))
    arms = {name: _continue(reference, name, one, progress) for name, one in made.items()}
    pairs = PAIRS + (MORE_PAIRS if incremental else [])
    gates = {
        f"replica_{name}": replica_exact(arms[name], arms[f"{name}_replica"])
        for name in ("live", "prefill", "incremental")
        if name in arms
    }
    extra = {"prefix_margins": list(live.boundary.margins)}
    return row_entry(task, index, state, list(arms.values()), pairs, gates, extra)


def _continue(reference: Reference, name: str, recorded: Recorded, progress: RowProgress) -> Arm:
    progress.arm(name)
    suffix = record_suffix(reference, recorded)
    progress.fed(len(suffix.tokens))
    return Arm(name, recorded.boundary, suffix)


def recorder_sha256() -> str:
    """Digest of this folder's code, which decides the recording together with transformers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def described(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a run of ours, changed where transformers stood in: source, attention, linear, environment."""
    numeric = [{**one, "attention": f"{SOURCE} sdpa", "linear": "torch.nn.Linear"} for one in manifest["numeric"]]
    return {
        **manifest,
        "source": SOURCE,
        "numeric": numeric,
        "environment": {**manifest["environment"], "transformers": versions.INSTALLED},
        "recorder_sha256": recorder_sha256(),
    }


def build_plan(options: RecordOptions) -> Plan:
    """Opens and checks everything, and loads the model. InputError before anything is written."""
    if "," in options.device:
        raise refuse("--device of the recorder", "one device: transformers' layers are not placed here", options.device)
    numeric = NumericContract(options.dtype, options.device, versions.matching_kernel(), threads=options.threads)
    checkpoint = open_checkpoint(options.checkpoint)
    contract = Contract.load(options.checkpoint)
    tasks, data = load_tasks(options.tasks, options.limit)
    order = [task.id for task in tasks]
    require_usable(numeric, checkpoint.config)  # the same library calls as transformers makes, so the same faults
    reference = Reference(options.checkpoint, numeric.torch_dtype, device=numeric.torch_device)
    prompts = prompt_states(tasks, contract, reference.config.max_position_embeddings, options.tasks)
    manifest = described(
        build_manifest(
            "matrix",
            [numeric],
            checkpoint,
            contract,
            data,
            order,
            options.preflight,
            panel={"incremental": True} if options.incremental else None,
            information={"tasks": str(options.tasks)},
        )
    )
    longest = max(contract.prefix_limit(len(prompt)) for prompt in prompts)
    saving = open_saving(options, manifest, longest, reference)

    def decode(index: int, progress: RowProgress) -> Steps[dict[str, Any]]:
        return record_row(reference, tasks[index], prompts[index], index, progress, saving, options.incremental)
        yield  # transformers steps by itself: a row is one piece of work

    return Plan(
        manifest=manifest,
        preflight=options.preflight,
        gates=(*GATES, *(["replica_incremental"] if options.incremental else [])),
        task=lambda index: tasks[index],
        decode=decode,
        model=lambda index: reference,  # nothing is taken together, so nothing reads it
        longest=longest,
        batch_size=1,
        summarise=lambda rows: matrix_summary(options.dtype, rows),
        closing=lambda summary: [closing_line(summary)],
    )


def open_saving(options: RecordOptions, manifest: dict[str, Any], longest: int, reference: Reference) -> Saving:
    """What is written beside the ledger: the files that a run of ours writes, with transformers as their source."""
    if options.traced:
        require_room(reference.config, options.dtype, min(options.trace_last or longest, longest))
    return Saving.chosen(
        options.directory,
        options.save_boundaries,
        options.traced,
        options.trace_last,
        manifest["row_order"],
        lambda: Provenance(SOURCE, manifest["checkpoint"], manifest["numeric"][0], manifest["environment"]),
    )


@click.command(help=__doc__)
@dtype_option
@record_options
@saving_options
def main(**given: Any) -> None:
    options = RecordOptions(**given)
    run_command(
        lambda: run_plan(build_plan(options), options.directory, options.fresh, options.quiet), "tests.hf.record"
    )


if __name__ == "__main__":
    main()
