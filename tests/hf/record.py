"""The retained-live matrix computed by transformers, written as the ledger that `experiments.matrix` writes.

Same tasks, contract, structural mask, greedy rule and batch of two; embedding, decoder, DynamicCache and SDPA are
transformers'. Compare the two runs with `python -m experiments.crosscheck`; transformers from 5.23 on
has the bits of our `--kernels packed_gqa`, earlier releases those of `repeat_kv`.

    python -m tests.hf.record --dtype bf16 --out runs/transformers-bf16
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from cache.storage import Provenance
from decode.contract import Contract
from decode.greedy import Steps
from experiments.run.designs import RetainedLive, matrix_summary
from experiments.run.exits import run_command
from experiments.run.experiment import Arm, Arms, replica_gate
from experiments.run.inputs import Models, Session
from experiments.run.loop import run
from experiments.run.options import (
    DEVICE,
    FRESH,
    LIMIT,
    QUIET,
    TASKS,
    THREADS,
    checkpoint_option,
    dtype_option,
    out_option,
    preflight_option,
    with_options,
)
from experiments.run.progress import RowProgress
from experiments.run.records import Manifest, Row, Summary
from experiments.run.saving import Saving, require_room, saving_options
from experiments.run.tasks import load_tasks, prompt_states
from minimodel.checkpoint import open_checkpoint
from minimodel.errors import refuse
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable
from tests.hf import versions
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
INCREMENTAL = click.option("--incremental", is_flag=True, help="Record the incremental arm too, and its replica.")
OPTIONS = [checkpoint_option(), TASKS, out_option("transformers-DTYPE"), LIMIT, preflight_option(8), INCREMENTAL]
OPTIONS += [DEVICE, THREADS, FRESH, QUIET]


@dataclass(frozen=True)
class Recording(RetainedLive):
    """A matrix whose rows transformers decodes; field for field what `experiments.matrix` writes."""

    decoder: Reference  # type: ignore[assignment]
    dtype: str = "bf16"

    def decode(self, index: int, progress: RowProgress) -> Steps[Arms]:
        progress.arm("boundary")
        row, reference, observe = self.tasks[index].id, self.decoder, self.saving.observe
        live = record_live(reference, self.states[index], observe(row, "live"))
        state = live.boundary.state
        made = {"live": live, "prefill": record_prefill(reference, state, observe(row, "prefill"))}
        if "incremental" in self.arms:
            made["incremental"] = record_incremental(reference, state, observe(row, "incremental"))
        for name in list(made):
            self.saving.write(row, name, made[name].boundary)
            made[f"{name}_replica"] = record_prefill(reference, state) if name == "prefill" else replica(made[name])
        require_disjoint(list(made.values()))
        progress.fed(len(state))
        return Arms(index, {name: _continue(reference, name, made[name], progress) for name in self.arms})
        yield  # transformers steps by itself: a row is one piece of work

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return matrix_summary(self.dtype, rows)

    def notes(self) -> list[str]:
        return []


@dataclass(frozen=True)
class IncrementalRecording(Recording):
    """The same with the two incremental arms and their comparisons."""

    arms = (*RetainedLive.arms, "incremental", "incremental_replica")
    pairs = (
        *RetainedLive.pairs,
        ("incremental", "incremental_replica"),
        ("live", "incremental"),
        ("incremental", "prefill"),
    )

    replica_incremental = replica_gate("incremental")


def _continue(reference: Reference, name: str, recorded: Recorded, progress: RowProgress) -> Arm:
    progress.arm(name)
    suffix = record_suffix(reference, recorded)
    progress.fed(len(suffix.tokens))
    return Arm(recorded.boundary, suffix)


def recorder_sha256() -> str:
    """Digest of this folder's code, which decides the recording together with transformers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def described(manifest: Manifest) -> Manifest:
    """The manifest of a run of ours, changed where transformers stood in: source, attention, linear, environment."""
    numeric = [{**one, "attention": f"{SOURCE} sdpa", "linear": "torch.nn.Linear"} for one in manifest["numeric"]]
    return {
        **manifest,
        "source": SOURCE,
        "numeric": numeric,
        "environment": {**manifest["environment"], "transformers": versions.INSTALLED},
        "recorder_sha256": recorder_sha256(),
    }


def run_recording(options: SimpleNamespace) -> int:
    """Opens and checks everything, loads the model, and records. InputError before anything is written."""
    if "," in options.device:
        raise refuse("--device of the recorder", "one device: transformers' layers are not placed here", options.device)
    numeric = NumericContract(options.dtype, options.device, versions.matching_kernel(), threads=options.threads)
    checkpoint, contract = open_checkpoint(options.checkpoint), Contract.load(options.checkpoint)
    tasks, data = load_tasks(options.tasks, options.limit)
    order = [task.id for task in tasks]
    require_usable(numeric, checkpoint.config)  # the same library calls as transformers makes, so the same faults
    reference = Reference(options.checkpoint, numeric.torch_dtype, device=numeric.torch_device)
    prompts = prompt_states(tasks, contract, reference.config.max_position_embeddings, options.tasks)
    session = Session("matrix", options, contract, Models(checkpoint, {options.dtype: numeric}))
    panel = {"incremental": True} if options.incremental else None
    manifest = described(session.manifest(order, panel, data))
    if options.traced:
        longest = max(contract.prefix_limit(len(prompt)) for prompt in prompts)
        require_room(reference.config, options.dtype, min(options.trace_last or longest, longest))
    saving = Saving.chosen(
        options.out,
        options.save_boundaries,
        options.traced,
        options.trace_last,
        order,
        lambda: Provenance(SOURCE, manifest["checkpoint"], manifest["numeric"][0], manifest["environment"]),
    )
    kind = IncrementalRecording if options.incremental else Recording
    return run(kind(reference, tasks, prompts, saving, options.dtype), manifest, options, options.out)


@click.command(help=__doc__)
@dtype_option
@partial(with_options, options=OPTIONS)
@saving_options
def main(**given: Any) -> None:
    options = SimpleNamespace(**given, batch_size=1)  # nothing is taken together
    options.out = options.out or Path("runs") / f"transformers-{options.dtype}"
    run_command(lambda: run_recording(options), "tests.hf.record")


if __name__ == "__main__":
    main()
