"""What an experiment over the bank opens first: the bank, the contract, the checkpoint, and its tasks where it has
any."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.contract import Contract
from decode.state import State
from experiments.harness.bank import Bank, Prefix, prefix_states, require_own_checkpoint, require_same_meaning
from experiments.harness.manifest import build_manifest
from experiments.harness.options import RunOptions
from experiments.harness.tasks import Task, load_tasks
from minimodel.checkpoint import Checkpoint, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable


@dataclass
class Models:
    """One loaded model at a time: the one before is let go before the next is read."""

    checkpoint: Checkpoint
    numeric: dict[str, NumericContract]
    _dtype: str = field(default="", init=False)
    _model: Decoder | None = field(default=None, init=False)

    def at(self, dtype: str) -> Decoder:
        """The checkpoint in `dtype`, its numeric contract put in force."""
        if self._model is None or self._dtype != dtype:
            self._model = None
            self.numeric[dtype].apply()
            self._model, self._dtype = decoder_from(self.checkpoint, self.numeric[dtype]), dtype
        return self._model


@dataclass(frozen=True)
class BankSession:
    """An experiment's inputs, checked: `bank` whole, nothing of it selected yet."""

    experiment: str
    options: RunOptions
    contract: Contract
    bank: Bank
    models: Models
    notes: tuple[str, ...] = ()  # on a checkpoint that is not the bank's own

    def states(self, prefixes: Sequence[Prefix]) -> list[State]:
        """The prefixes as discrete states under this checkpoint's contract."""
        context = self.models.checkpoint.config.max_position_embeddings
        return prefix_states(self.bank, list(prefixes), self.contract, context)

    def longest(self, states: Sequence[State]) -> int:
        """The most tokens that a continuation of any of these prefixes can hold."""
        return max(len(state) for state in states) + self.contract.suffix_limit()

    def manifest(
        self, row_order: list[str], panel: dict[str, Any], tasks_bytes: bytes | None = None, **information: str
    ) -> dict[str, Any]:
        """The manifest of a run over `row_order`, its panel led by the bank's digest."""
        manifest = build_manifest(
            self.experiment,
            list(self.models.numeric.values()),
            self.models.checkpoint,
            self.contract,
            tasks_bytes,
            row_order,
            self.options.preflight,
            panel={"bank": self.bank.record(), **panel},
            information={"source": str(self.bank.source), **information},
        )
        return {**manifest, "checkpoint_warnings": [*manifest["checkpoint_warnings"], *self.notes]}


def open_bank_session(
    experiment: str,
    options: RunOptions,
    dtypes: Sequence[str],
    bank: Bank,
    same_weights: bool = True,
    numeric: dict[str, NumericContract] | None = None,
) -> BankSession:
    """Opens and checks everything but tasks; reads no weight.

    numeric: numeric contracts by a name of their own, where an experiment crosses more than dtypes. same_weights: the
    checkpoint must be the one that the bank's run decoded; else its tokens and contract must mean the same.
    """
    numeric = numeric or {dtype: options.numeric(dtype) for dtype in dtypes}
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
    """The task and the prompt state of each prefix, and the task file's bytes.

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
