"""What an experiment opens first: tasks, contract, checkpoint and models, checked before anything is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decode.contract import Contract
from decode.state import State
from experiments.run.bank import Bank, Prefix, prefix_states, require_own_checkpoint, require_same_meaning
from experiments.run.exits import one_line, start_again_reproducibly
from experiments.run.manifest import build_manifest
from experiments.run.options import RunOptions
from experiments.run.records import Manifest, Panel
from experiments.run.tasks import Task, load_tasks, prompt_states
from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import CopiesDiffer, InputError
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable


@dataclass(frozen=True)
class Session:
    """An experiment's inputs at one dtype."""

    experiment: str  # the command's name
    options: RunOptions
    numeric: NumericContract
    contract: Contract
    model: Decoder
    tasks: list[Task]  # in source order
    prompts: list[State]  # of each task
    tasks_bytes: bytes  # the task file's
    checkpoint: Checkpoint

    def manifest(self, row_order: list[str] | None = None, panel: Panel | None = None) -> Manifest:
        """Returns the manifest of a run over `row_order`, all tasks in source order without one."""
        return build_manifest(
            self.experiment,
            [self.numeric],
            self.checkpoint,
            self.contract,
            self.tasks_bytes,
            [task.id for task in self.tasks] if row_order is None else row_order,
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


@dataclass
class Models:
    """One loaded model at a time: the one before is let go before the next is read."""

    checkpoint: Checkpoint
    numeric: dict[str, NumericContract]  # by dtype, or by cell
    _name: str = field(default="", init=False)
    _model: Decoder | None = field(default=None, init=False)

    def at(self, name: str) -> Decoder:
        """Returns the checkpoint under the contract `name`; loading puts the contract in force."""
        if self._model is None or self._name != name:
            self._model = None
            self.numeric[name].apply()
            self._model, self._name = decoder_from(self.checkpoint, self.numeric[name]), name
        return self._model


@dataclass(frozen=True)
class BankSession:
    """The inputs of an experiment over the bank."""

    experiment: str  # the command's name
    options: RunOptions
    contract: Contract
    bank: Bank  # whole: nothing of it is selected yet
    models: Models
    notes: tuple[str, ...] = ()  # on a checkpoint that is not the bank's own

    def states(self, prefixes: Sequence[Prefix]) -> list[State]:
        """Returns the prefixes as discrete states under this checkpoint's contract."""
        context = self.models.checkpoint.config.max_position_embeddings
        return prefix_states(self.bank, list(prefixes), self.contract, context)

    def manifest(self, row_order: list[str], panel: Panel, tasks_bytes: bytes | None = None) -> Manifest:
        """Returns the manifest of a run over `row_order`, its panel led by the bank's digest."""
        tasks = {} if tasks_bytes is None else {"tasks": str(self.options.tasks)}
        manifest = build_manifest(
            self.experiment,
            list(self.models.numeric.values()),
            self.models.checkpoint,
            self.contract,
            tasks_bytes,
            row_order,
            self.options.preflight,
            panel={"bank": self.bank.record(), **panel},
            information={"source": str(self.bank.source), **tasks},
        )
        return {**manifest, "checkpoint_warnings": [*manifest["checkpoint_warnings"], *self.notes]}


def open_bank_session(
    experiment: str,
    options: RunOptions,
    bank: Bank,
    numeric: dict[str, NumericContract],
    same_weights: bool = True,
) -> BankSession:
    """Opens and checks everything but tasks; reads no weight.

    numeric: numeric contracts by dtype, or by a name of their own where an experiment crosses more than dtypes.
    same_weights: the checkpoint must be the one that the bank's run decoded; else its tokens and contract must mean the
    same.
    """
    checkpoint = open_checkpoint(options.checkpoint)  # first: whatever is read later is held to what it found
    contract = Contract.load(checkpoint)
    notes: list[str] = []
    if same_weights:
        require_own_checkpoint(bank, options.checkpoint)
    else:
        notes = require_same_meaning(bank, contract, options.checkpoint)
    for one in numeric.values():
        require_usable(one, checkpoint.config)
    return BankSession(experiment, options, contract, bank, Models(checkpoint, numeric), tuple(notes))


def bank_tasks(session: BankSession, prefixes: Sequence[Prefix]) -> tuple[list[Task], list[State], bytes]:
    """Returns the task and the prompt state of each prefix, and the task file's bytes.

    InputError when a row's task is missing, or its prompt block is not the beginning of its prefix.
    """
    path = session.options.tasks
    assert path is not None, "this experiment reads tasks"
    tasks, data = load_tasks(path, None)
    named = {task.id: task for task in tasks}
    chosen, prompts = [], []
    for prefix in prefixes:
        if prefix.row not in named:
            raise InputError(f"{path}: expected a task for the bank's row {prefix.row}, found none")
        task = named[prefix.row]
        prompt = State.prompt(session.contract, task.question, task.choices)
        if prompt.tokens != prefix.tokens[: len(prompt)]:
            raise InputError(f"{path}: task {task.id}: expected the prompt that its prefix begins with, found another")
        chosen.append(task)
        prompts.append(prompt)
    return chosen, prompts, data


def left_out(numeric: Mapping[str, NumericContract], config: ModelConfig, module: str) -> dict[str, str]:
    """Returns a reason for each contract that cannot be run here, by its name. InputError when none can.

    The command `module` starts again in MKL's reproducible mode where equal copies differ without it.
    """
    reasons = {}
    for name, one in numeric.items():
        try:
            require_usable(one, config)
        except InputError as error:
            if isinstance(error, CopiesDiffer):
                start_again_reproducibly(module, error)
            reasons[name] = one_line(error)
    if len(reasons) == len(numeric):
        raise InputError(next(iter(reasons.values())))
    return reasons
