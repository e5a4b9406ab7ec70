"""What a decoding experiment opens first: tasks, contract and model, checked before anything is written."""

from dataclasses import dataclass
from typing import Any

from decode.contract import Contract
from decode.state import State
from experiments.harness.manifest import build_manifest
from experiments.harness.options import RunOptions
from experiments.harness.tasks import Task, load_tasks, prompt_states
from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable


@dataclass(frozen=True)
class Session:
    """Holds an experiment's inputs at one dtype, in task order."""

    experiment: str
    options: RunOptions
    numeric: NumericContract
    contract: Contract
    model: Decoder
    tasks: list[Task]
    prompts: list[State]
    tasks_bytes: bytes
    checkpoint: Checkpoint

    def manifest(self, panel: dict[str, Any] | None = None) -> dict[str, Any]:
        """The manifest of a run over all tasks in source order."""
        return build_manifest(
            self.experiment,
            [self.numeric],
            self.checkpoint,
            self.contract,
            self.tasks_bytes,
            [task.id for task in self.tasks],
            self.options.preflight,
            panel=panel,
            information={"tasks": str(self.options.tasks)},
        )


def open_session(experiment: str, options: RunOptions, dtype: str) -> Session:
    """Opens and checks everything. InputError for the first kind of fault, listing every row it touches."""
    numeric = options.numeric(dtype)
    checkpoint = open_checkpoint(options.checkpoint)  # first: whatever is read later is held to what it found
    contract = Contract.load(checkpoint)
    assert options.tasks is not None, "this experiment reads tasks"
    tasks, data = load_tasks(options.tasks, options.limit)
    prompts = prompt_states(tasks, contract, checkpoint.config.max_position_embeddings, options.tasks)
    require_usable(numeric, checkpoint.config)
    model = decoder_from(checkpoint, numeric)
    return Session(experiment, options, numeric, contract, model, tasks, prompts, data, checkpoint)
