"""What an experiment opens first and checks before anything is written: tasks or bank, panel, checkpoint and models.

The bank is every BF16 boundary prefix of a finished matrix run, in source order, without filtering (paper, section
3.4). It is read from the matrix run itself, or from a fixed_prefix run, each of whose precisions holds all of it. Its
digest is over the prefixes, so that a bank has one digest whichever of the two it is read from.

A panel is the rows that an experiment froze before it decoded any.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from decode.contract import Contract
from decode.state import State
from experiments.run.directory import ROWS, read_finished
from experiments.run.exits import one_line, start_again_reproducibly
from experiments.run.ledger import canonical, compare_leaves, row_key, sha256_text
from experiments.run.options import SCHEMA, RunOptions, code_sha256, contract_entries, git_state, plan_record
from experiments.run.records import ContractEntries, Manifest, Panel
from experiments.run.tasks import Prefix, Task, load_tasks, longest_row, prompt_states
from minimodel.checkpoint import Checkpoint, file_digests, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import CopiesDiffer, InputError, refuse
from minimodel.load import decoder_from
from minimodel.machine import machine_record
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable
from stats.panels import length_spread

BANK_DTYPE = "bf16"
MATRIX_COMMAND = f"python -m experiments.matrix --dtype {BANK_DTYPE}"
FIXED_COMMAND = "python -m experiments.fixed_prefix"
SPREAD = "evenly spaced order statistics after sorting by (prefix length, row id); no outcome and no answer is read"


@dataclass(frozen=True)
class Bank:
    """The prefixes of a run."""

    prefixes: tuple[Prefix, ...]  # in source order
    source: Path  # the run's directory
    manifest: Manifest  # the run's
    ledger_sha256: str  # of the rows.jsonl of the matrix run whose prefixes these are

    def record(self) -> dict[str, Any]:
        """Returns the manifest's `panel.bank`."""
        lines = [canonical({**prefix.name(), "tokens": list(prefix.tokens)}) + "\n" for prefix in self.prefixes]
        return {"sha256": sha256_text("".join(lines)), "rows": len(lines), "ledger_sha256": self.ledger_sha256}


def open_bank(path: Path) -> Bank:
    """Returns the bank of a finished matrix or fixed_prefix run.

    InputError where the run is missing, unfinished or altered, and for a matrix of another dtype.
    """
    return _open_bank(path, ("matrix", "fixed_prefix"), MATRIX_COMMAND)[0]


def open_strata(path: Path) -> tuple[Bank, dict[str, str]]:
    """Returns the bank of a finished fixed_prefix run, and each row's stratum: "exact" where its BF16 suffixes were
    equal, else "divergent"."""
    bank, rows = _open_bank(path, ("fixed_prefix",), FIXED_COMMAND)
    strata = {
        row["row"]: "exact" if row["comparisons"]["incremental:prefill"]["suffix"]["exact"] else "divergent"
        for row in rows
        if row["dtype"] == BANK_DTYPE
    }
    if list(strata) != [prefix.id for prefix in bank.prefixes]:
        raise InputError(f"{path}: expected {BANK_DTYPE} rows for the whole bank, found {len(strata)}; {FIXED_COMMAND}")
    return bank, strata


def _open_bank(path: Path, experiments: tuple[str, ...], command: str) -> tuple[Bank, Sequence[Mapping[str, Any]]]:
    """Returns the bank and the rows of a finished run that passed its gates. InputError ends with the command that
    makes one."""
    try:
        run, summary = read_finished(path)
    except InputError as error:
        raise InputError(f"{error}; make it with: {command}") from None
    if run.experiment not in experiments:
        raise refuse(f"{path}: experiment", " or ".join(experiments), run.experiment)
    if not summary.get("passed"):
        raise InputError(f"{path}: expected a run whose gates all passed, found failed rows; make it with: {command}")
    rows, dtype, matrix = list(run.rows.values()), run.manifest["numeric"][0]["dtype"], run.experiment == "matrix"
    if matrix and dtype != BANK_DTYPE:
        raise InputError(f"{path}: expected a {BANK_DTYPE} run, found {dtype}; make it with: {MATRIX_COMMAND}")
    firsts = [row for row in rows if row.get("dtype", dtype) == dtype]
    digest = run.ledger_sha256 if matrix else run.manifest["panel"]["bank"]["ledger_sha256"]
    prefixes = tuple(Prefix(row["row"], tuple(row["prefix"]["tokens"])) for row in firsts)
    bank = Bank(prefixes, path, run.manifest, digest)
    for prefix, row in zip(prefixes, firsts):
        if prefix.sha256 != row["prefix"]["sha256"]:
            where = f"{path / ROWS} row {row_key(row)}: SHA-256 of the {len(prefix)} prefix tokens"
            raise refuse(where, row["prefix"]["sha256"], prefix.sha256)
    if not matrix and bank.record() != run.manifest["panel"]["bank"]:
        raise refuse(f"{path}: the bank that its rows hold", str(run.manifest["panel"]["bank"]), bank.record())
    return bank, rows


Item = TypeVar("Item", bound=Prefix)


def select_spread(items: Sequence[Item], wanted: int) -> list[Item]:
    """Returns `wanted` rows, or all where there are fewer, evenly spaced from the shortest to the longest."""
    return [items[index] for index in length_spread(lengths(items), min(wanted, len(items)))]


def lengths(items: Sequence[Prefix]) -> list[tuple[int, str]]:
    """Returns (length, row id) of each: all that the outcome-blind selections read."""
    return [(len(item), item.id) for item in items]


def spread_record(rule: str, chosen: Sequence[Prefix], wanted: int, available: int) -> Panel:
    """Returns the panel of `wanted` of so many available rows, without strata."""
    rows = [row.name() for row in chosen]
    return Panel(rule=rule, wanted={"rows": wanted}, available={"rows": available}, rows=rows)


def panel_counts(panel: Panel) -> dict[str, dict[str, int]]:
    """Returns the summary's `panel`: wanted, available and selected rows, each by stratum."""
    strata = {name: [row for row in panel["rows"] if row.get("stratum", name) == name] for name in panel["wanted"]}
    selected = {name: len(rows) for name, rows in strata.items()}
    return {"wanted": panel["wanted"], "available": panel["available"], "selected": selected}


def panel_span(panel: Panel) -> dict[str, int]:
    """Returns {min, max} of the chosen rows' lengths."""
    found = [row["length"] for row in panel["rows"]]
    return {"min": min(found), "max": max(found)}


def shortfall(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a sentence where a stratum holds fewer rows than the design wants; none otherwise."""
    short = [
        f"{counts['selected'][stratum]} of {wanted} {stratum}{'' if stratum == 'rows' else ' rows'} "
        f"(the source has {counts['available'][stratum]})"
        for stratum, wanted in counts["wanted"].items()
        if counts["selected"][stratum] < wanted
    ]
    return [f"Fewer rows than the design wants: {'; '.join(short)}."] if short else []


@dataclass
class Models:
    """One loaded model at a time: the one before is freed before the next is read."""

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
class Session:
    """The inputs of an experiment, opened and checked; no weight is read yet."""

    experiment: str  # the command's name
    options: RunOptions
    contract: Contract | None  # None: a stock checkpoint, which has no blocks
    models: Models
    bank: Bank | None = None  # whole: nothing of it is selected yet; None: the experiment starts from tasks
    notes: tuple[str, ...] = ()  # on a checkpoint that is not the bank's own

    def tasks(self, limit: int | None) -> tuple[list[Task], list[State], bytes]:
        """Returns the first `limit` tasks (all without one), the prompt state of each, and the task file's bytes."""
        assert self.options.tasks is not None and self.contract is not None, "this experiment reads tasks into blocks"
        tasks, data = load_tasks(self.options.tasks, limit)
        context = self.models.checkpoint.config.max_position_embeddings
        return tasks, prompt_states(tasks, self.contract, context, self.options.tasks), data

    def bank_tasks(self, prefixes: Sequence[Prefix]) -> tuple[list[Task], list[State], bytes]:
        """Returns the task and the prompt state of each prefix, and the task file's bytes.

        InputError when a row's task is missing, or its prompt block is not the beginning of its prefix.
        """
        path = self.options.tasks
        assert path is not None and self.contract is not None, "this experiment reads tasks into blocks"
        tasks, data = load_tasks(path, None)
        named = {task.id: task for task in tasks}
        prompts = []
        for prefix in prefixes:
            if prefix.id not in named:
                raise InputError(f"{path}: expected a task for the bank's row {prefix.id}, found none")
            task = named[prefix.id]
            prompt = State.prompt(self.contract, task.question, task.choices)
            if prompt.tokens != prefix.tokens[: len(prompt)]:
                where = f"{path}: task {task.id}"
                raise InputError(f"{where}: expected the prompt that its prefix begins with, found another")
            prompts.append(prompt)
        return [named[prefix.id] for prefix in prefixes], prompts, data

    def states(self, prefixes: Sequence[Prefix]) -> list[State]:
        """Replays prefixes of the bank through this checkpoint's contract and returns the states. InputError names the
        first that is no boundary or fills the context."""
        assert self.bank is not None and self.contract is not None, "this experiment starts from a bank"
        context, states = self.models.checkpoint.config.max_position_embeddings, []
        for prefix in prefixes:
            where = f"{self.bank.source}: prefix of row {prefix.id}"
            try:
                state = State.from_tokens(self.contract, prefix.tokens)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            if not state.structure.at_boundary:
                raise InputError(f"{where}: expected an end right after merge's opening delimiter, found another")
            longest = longest_row([state])
            if longest > context:
                raise InputError(f"{where}: its row may reach {longest} tokens, expected at most the context {context}")
            states.append(state)
        return states

    def manifest(self, row_order: list[str], panel: Panel | None = None, tasks_bytes: bytes | None = None) -> Manifest:
        """Returns the manifest of a run over `row_order`. It holds everything that decides a row's bits, is written
        before the first row, and is compared on resume.

        Each numeric contract is put in force, to record what that gives; the bank's digest leads the panel.
        """
        checkpoint, contracts, records = self.models.checkpoint, self.models.numeric.values(), []
        for one in contracts:
            one.apply()
            records.append(one.record())
        dtypes = dict.fromkeys(one.torch_dtype for one in contracts)
        casts = [line for dtype in dtypes for line in checkpoint.cast_warnings(dtype)]
        led, files = panel or Panel(), {} if tasks_bytes is None else {"tasks": str(self.options.tasks)}
        if self.bank is not None:
            led, files = {"bank": self.bank.record(), **led}, {"source": str(self.bank.source), **files}
        entries: ContractEntries = {} if self.contract is None else contract_entries(self.contract)
        return {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "numeric": records,
            "environment": machine_record(),
            "code_sha256": code_sha256(),
            "checkpoint": file_digests(checkpoint),
            "checkpoint_warnings": [*checkpoint.warnings, *casts, *self.notes],
            "tasks_sha256": None if tasks_bytes is None else hashlib.sha256(tasks_bytes).hexdigest(),
            **entries,
            "preflight": self.options.preflight,
            "plan": plan_record(),
            "panel": led,
            "row_order": row_order,
            "information": {"checkpoint": str(checkpoint.directory), "command": sys.argv[1:], **git_state(), **files},
        }


def open_session(
    experiment: str,
    options: RunOptions,
    numeric: dict[str, NumericContract],
    bank: Bank | None = None,
    same_weights: bool = True,
) -> Session:
    """Opens and checks the checkpoint, its contract and the machine.

    numeric: numeric contracts by dtype, or by another name where an experiment crosses more than dtypes. same_weights:
    the checkpoint must be the one that the bank's run decoded, file by file; else its tokens and contract must mean the
    same.
    """
    checkpoint = open_checkpoint(options.checkpoint)  # first: whatever is read later is held to what it found
    contract = Contract.load(checkpoint)
    notes: tuple[str, ...] = ()
    if bank is not None and same_weights:
        found, wanted = file_digests(options.checkpoint), bank.manifest["checkpoint"]
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                where = f"{options.checkpoint / name}: SHA-256, as the run in {bank.source} had it"
                raise refuse(where, str(wanted.get(name)), found.get(name))
    elif bank is not None:
        notes = _other_files(bank, contract, options.checkpoint)
    for one in numeric.values():
        require_usable(one, checkpoint.config)
    return Session(experiment, options, contract, Models(checkpoint, numeric), bank, notes)


def _other_files(bank: Bank, contract: Contract, checkpoint: Path) -> tuple[str, ...]:
    """Returns a note for each file of another checkpoint that differs in bytes and not in its meaning for the tokens.

    InputError where vocabulary, merges, delimiter ids, eligible ids, caps, visibility or role offset differ.
    """
    entries = contract_entries(contract)
    differing = compare_leaves({key: bank.manifest.get(key) for key in entries}, entries).lines("expected", "found")
    if differing:
        where = f"{checkpoint}: expected tokens and contract as in the run in {bank.source}"
        raise InputError(f"{where}; {'; '.join(differing[:3])}")
    found, wanted = file_digests(checkpoint), bank.manifest["checkpoint"]
    return tuple(
        f"{name}: other bytes than in the run in {bank.source} (SHA-256 {found.get(name)}, there {wanted.get(name)}); "
        "vocabulary, merges, delimiters, eligible ids and contract are equal"
        for name in ("tokenizer.json", "contract.json")
        if found.get(name) != wanted.get(name)
    )


def left_out(
    numeric: Mapping[str, NumericContract], config: ModelConfig, module: str, chunks: tuple[int, ...] = ()
) -> dict[str, str]:
    """Returns a reason for each contract that cannot be run here, by its name. InputError when none can.

    chunks: lengths of the calls in which prefixes are prefilled, beside whole prefills. The command `module` starts
    again in MKL's reproducible mode where equal copies differ without it.
    """
    reasons = {}
    for name, one in numeric.items():
        try:
            require_usable(one, config, chunks)
        except InputError as error:
            if isinstance(error, CopiesDiffer):
                start_again_reproducibly(module, error)
            reasons[name] = one_line(error)
    if len(reasons) == len(numeric):
        raise InputError(next(iter(reasons.values())))
    return reasons
