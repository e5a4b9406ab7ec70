"""What an experiment opens first and checks before anything is written: tasks or bank, panel, checkpoint and models.

The bank is every BF16 boundary prefix of a finished matrix run, in source order, without filtering (paper, section
3.4). It is read from the matrix run itself, or from the copy `bank.jsonl` that a fixed_prefix run keeps beside its
ledger. The digest is that of the copy's bytes, so that a bank has one digest whichever of the two it is read from.

A panel is the rows that an experiment froze before it decoded any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from decode.contract import Contract
from decode.state import State, token_digest
from experiments.run.directory import ROWS, read_finished
from experiments.run.exits import one_line, start_again_reproducibly
from experiments.run.ledger import canonical, compare_leaves, require_distinct, row_key, sha256_file, sha256_text
from experiments.run.options import RunOptions, build_manifest, contract_entries
from experiments.run.records import Manifest, Panel, PanelRow, Row
from experiments.run.tasks import Task, load_tasks, prompt_states
from minimodel.checkpoint import Checkpoint, file_digests, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import CopiesDiffer, InputError, refuse
from minimodel.files import parse_json, read_bytes
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.selfcheck import require_usable
from stats.panels import length_spread

BANK, BANK_DTYPE = "bank.jsonl", "bf16"
MATRIX_COMMAND = f"python -m experiments.matrix --dtype {BANK_DTYPE}"
FIXED_COMMAND = "python -m experiments.fixed_prefix"
MAX_BANK_BYTES = 1 << 30
SPREAD = "evenly spaced order statistics after sorting by (prefix length, row id); no outcome and no answer is read"


@dataclass(frozen=True)
class Prefix:
    """One row's boundary prefix."""

    row: str  # its id
    tokens: tuple[int, ...]  # through merge's opening delimiter
    sha256: str  # their digest

    @classmethod
    def read(cls, row: Any, entry: Mapping[str, Any], where: str) -> "Prefix":
        """InputError where the tokens are not what their digest says."""
        tokens, digest = tuple(entry["tokens"]), entry["sha256"]
        if token_digest(tokens) != digest or entry["length"] != len(tokens):
            raise refuse(f"{where}: SHA-256 of the {entry['length']} prefix tokens", digest, token_digest(tokens))
        return cls(str(row), tokens, digest)

    def __len__(self) -> int:
        return len(self.tokens)

    def name(self) -> PanelRow:
        """Returns what a manifest's panel keeps of it."""
        return {"row": self.row, "length": len(self), "sha256": self.sha256}


@dataclass(frozen=True)
class Bank:
    """The prefixes of a run."""

    prefixes: tuple[Prefix, ...]  # in source order
    source: Path  # the run's directory
    manifest: Manifest  # the run's
    ledger_sha256: str  # of the matrix ledger

    def text(self) -> str:
        """Returns bank.jsonl: one canonical line per prefix."""
        return "".join(canonical({**p.name(), "tokens": list(p.tokens)}) + "\n" for p in self.prefixes)

    def record(self) -> dict[str, Any]:
        """Returns the manifest's `panel.bank`."""
        return {"sha256": sha256_text(self.text()), "rows": len(self.prefixes), "ledger_sha256": self.ledger_sha256}

    def first(self, limit: int | None) -> "Bank":
        """Returns the bank of the first `limit` prefixes."""
        return replace(self, prefixes=self.prefixes[:limit])


def _open_source(path: Path, experiments: tuple[str, ...], command: str) -> tuple[Manifest, list[Row]]:
    """Returns manifest and rows of a finished run that passed its gates. InputError ends with the command that makes
    one."""
    try:
        run, summary = read_finished(path)
    except InputError as error:
        raise InputError(f"{error}; make it with: {command}") from None
    if run.experiment not in experiments:
        raise refuse(f"{path}: experiment", " or ".join(experiments), run.experiment)
    if not summary.get("passed"):
        raise InputError(f"{path}: expected a run whose gates all passed, found failed rows; make it with: {command}")
    return cast(Manifest, run.manifest), [cast(Row, row) for row in run.rows.values()]


def open_bank(path: Path) -> Bank:
    """Returns the bank of a finished matrix or fixed_prefix run.

    InputError where the run is missing, unfinished or altered, and for a matrix of another dtype.
    """
    manifest, rows = _open_source(path, ("matrix", "fixed_prefix"), MATRIX_COMMAND)
    if manifest["experiment"] == "fixed_prefix":
        return _copied_bank(path, manifest)
    dtype = manifest["numeric"][0]["dtype"]
    if dtype != BANK_DTYPE:
        raise InputError(f"{path}: expected a {BANK_DTYPE} run, found {dtype}; make it with: {MATRIX_COMMAND}")
    prefixes = [Prefix.read(row["row"], row["prefix"], f"{path / ROWS} row {row_key(row)}") for row in rows]
    return Bank(tuple(prefixes), path, manifest, sha256_file(path / ROWS))


def _copied_bank(path: Path, manifest: Manifest) -> Bank:
    """Returns the bank of a fixed_prefix run's copy. InputError unless it is the one that the run's manifest froze."""
    file, frozen = path / BANK, manifest["panel"]["bank"]
    lines = [(f"{file} line {n}", line) for n, line in enumerate(read_bytes(file, MAX_BANK_BYTES).splitlines(), 1)]
    entries = [(where, parse_json(line, where)) for where, line in lines]
    prefixes = [Prefix.read(entry.get("row"), entry, where) for where, entry in entries]
    require_distinct([prefix.row for prefix in prefixes], f"{file}: row")
    bank = Bank(tuple(prefixes), path, manifest, frozen["ledger_sha256"])
    if sha256_file(file) != frozen["sha256"] or bank.record() != frozen:
        raise refuse(f"{file}: SHA-256", frozen["sha256"], sha256_file(file))
    return bank


def open_strata(path: Path) -> tuple[Bank, dict[str, str]]:
    """Returns the bank of a finished fixed_prefix run, and each row's stratum: "exact" where its BF16 suffixes were
    equal, else "divergent"."""
    manifest, rows = _open_source(path, ("fixed_prefix",), FIXED_COMMAND)
    bank = _copied_bank(path, manifest)
    strata = {
        row["row"]: "exact" if row["comparisons"]["incremental:prefill"]["suffix"]["exact"] else "divergent"
        for row in rows
        if row["dtype"] == BANK_DTYPE
    }
    if list(strata) != [prefix.row for prefix in bank.prefixes]:
        raise InputError(f"{path}: expected {BANK_DTYPE} rows for the whole bank, found {len(strata)}; {FIXED_COMMAND}")
    return bank, strata


class Sized(Protocol):
    """A row to choose from."""

    @property
    def row(self) -> str: ...  # its id
    def __len__(self) -> int: ...  # its tokens


Item = TypeVar("Item", bound=Sized)


def select_spread(items: Sequence[Item], wanted: int) -> list[Item]:
    """Returns `wanted` rows, or all where there are fewer, evenly spaced from the shortest to the longest."""
    return [items[index] for index in length_spread(lengths(items), min(wanted, len(items)))]


def lengths(items: Sequence[Sized]) -> list[tuple[int, str]]:
    """Returns (length, row id) of each: all that the outcome-blind selections read."""
    return [(len(item), item.row) for item in items]


def panel_record(rule: str, wanted: Mapping[str, int], available: Mapping[str, int], rows: Sequence[PanelRow]) -> Panel:
    """Returns the manifest's `panel`."""
    return {"rule": rule, "wanted": dict(wanted), "available": dict(available), "rows": list(rows)}


def spread_record(chosen: Sequence[Prefix], wanted: int, bank: Bank) -> Panel:
    """Returns the panel of an outcome-blind length spread over the whole bank."""
    return panel_record(SPREAD, {"rows": wanted}, {"rows": len(bank.prefixes)}, [prefix.name() for prefix in chosen])


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


@dataclass(frozen=True)
class Session:
    """The inputs of an experiment over tasks, at one dtype."""

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
        order = [task.id for task in self.tasks] if row_order is None else row_order
        contracts, given = [self.numeric], {"tasks": str(self.options.tasks)}
        parts = (contracts, self.checkpoint, self.contract, self.tasks_bytes, order, self.options.preflight)
        return build_manifest(self.experiment, *parts, panel=panel, information=given)


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
class BankSession:
    """The inputs of an experiment over the bank."""

    experiment: str  # the command's name
    options: RunOptions
    contract: Contract
    bank: Bank  # whole: nothing of it is selected yet
    models: Models
    notes: tuple[str, ...] = ()  # on a checkpoint that is not the bank's own

    def states(self, prefixes: Sequence[Prefix]) -> list[State]:
        """Replays the prefixes through this checkpoint's contract and returns the states. InputError names the first
        that is no boundary or fills the context."""
        context, states = self.models.checkpoint.config.max_position_embeddings, []
        for prefix in prefixes:
            where = f"{self.bank.source}: prefix of row {prefix.row}"
            try:
                state = State.from_tokens(self.contract, prefix.tokens)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            if not state.structure.at_boundary:
                raise InputError(f"{where}: expected an end right after merge's opening delimiter, found another")
            longest = len(state) + self.contract.suffix_limit()
            if longest > context:
                raise InputError(f"{where}: its row may reach {longest} tokens, expected at most the context {context}")
            states.append(state)
        return states

    def manifest(self, row_order: list[str], panel: Panel, tasks_bytes: bytes | None = None) -> Manifest:
        """Returns the manifest of a run over `row_order`, its panel led by the bank's digest."""
        information = {"source": str(self.bank.source)}
        if tasks_bytes is not None:
            information["tasks"] = str(self.options.tasks)
        contracts, models = list(self.models.numeric.values()), self.models
        parts = (contracts, models.checkpoint, self.contract, tasks_bytes, row_order, self.options.preflight)
        whole: Panel = {"bank": self.bank.record(), **panel}
        manifest = build_manifest(self.experiment, *parts, panel=whole, information=information)
        return {**manifest, "checkpoint_warnings": [*manifest["checkpoint_warnings"], *self.notes]}


def open_bank_session(
    experiment: str,
    options: RunOptions,
    bank: Bank,
    numeric: dict[str, NumericContract],
    same_weights: bool = True,
) -> BankSession:
    """Opens and checks everything but tasks; reads no weight.

    numeric: numeric contracts by dtype, or by another name where an experiment crosses more than dtypes. same_weights:
    the checkpoint must be the one that the bank's run decoded, file by file; else its tokens and contract must mean the
    same.
    """
    checkpoint = open_checkpoint(options.checkpoint)  # first: whatever is read later is held to what it found
    contract = Contract.load(checkpoint)
    found, wanted = file_digests(options.checkpoint), bank.manifest["checkpoint"]
    for name in sorted({*found, *wanted}) if same_weights else ():
        if found.get(name) != wanted.get(name):
            where = f"{options.checkpoint / name}: SHA-256, as the run in {bank.source} had it"
            raise refuse(where, str(wanted.get(name)), found.get(name))
    notes = () if same_weights else _other_files(bank, contract, options.checkpoint)
    for one in numeric.values():
        require_usable(one, checkpoint.config)
    return BankSession(experiment, options, contract, bank, Models(checkpoint, numeric), notes)


def _other_files(bank: Bank, contract: Contract, checkpoint: Path) -> tuple[str, ...]:
    """Returns notes on files of another checkpoint that mean the same to the bank's tokens in other bytes.

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


def bank_tasks(session: BankSession, prefixes: Sequence[Prefix]) -> tuple[list[Task], list[State], bytes]:
    """Returns the task and the prompt state of each prefix, and the task file's bytes.

    InputError when a row's task is missing, or its prompt block is not the beginning of its prefix.
    """
    path = session.options.tasks
    assert path is not None, "this experiment reads tasks"
    tasks, data = load_tasks(path, None)
    named = {task.id: task for task in tasks}
    prompts = []
    for prefix in prefixes:
        if prefix.row not in named:
            raise InputError(f"{path}: expected a task for the bank's row {prefix.row}, found none")
        task = named[prefix.row]
        prompt = State.prompt(session.contract, task.question, task.choices)
        if prompt.tokens != prefix.tokens[: len(prompt)]:
            raise InputError(f"{path}: task {task.id}: expected the prompt that its prefix begins with, found another")
        prompts.append(prompt)
    return [named[prefix.row] for prefix in prefixes], prompts, data


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
