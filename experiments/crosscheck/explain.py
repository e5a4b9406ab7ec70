"""Explains why one pair differs: the first differing step, and the named kernels under which our code has each side's
bits. From saved tensors where both sides have them, else computed again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache.boundary import SCHEMA as BOUNDARY
from cache.boundary import Boundary
from cache.build import build_incremental, build_prefill
from cache.digest import cache_sha256, tensor_sha256
from cache.storage import Stored
from decode.contract import Contract
from decode.greedy import greedy_suffix
from decode.state import State
from experiments.crosscheck.compare import LETTERS, FilePair, common_prefix_step, compare_files
from experiments.crosscheck.tensors import Difference, first_step, in_memory
from experiments.run.directory import Run
from experiments.run.inputs import left_out
from experiments.run.ledger import first_unequal
from experiments.run.records import ArmEntry, Row
from experiments.run.saving import BOUNDARIES, TRACES, Trace, file_name, require_room
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import same_bits
from minimodel.checkpoint import file_digests, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.load import load_model
from minimodel.numerics import DEFAULT_THREADS, KERNELS, NumericContract

BITS: tuple[Literal["cache_sha256", "logits_sha256"], ...] = ("cache_sha256", "logits_sha256")
SUFFIX: dict[Literal["suffix", "margins"], str] = {"suffix": "suffix", "margins": "margins of the suffix"}
Sides = tuple[Row, Row]  # of A and of B
TOKEN_BY_TOKEN = ("live", "live_replica", "incremental", "incremental_replica")
ONE_CALL = ("prefill", "prefill_replica")


@dataclass(frozen=True)
class Rerun:
    """A checkpoint on this machine, with which constructions can be computed again."""

    directory: Path
    numeric: Mapping[str, Any]  # the recorded contract whose dtype, device and threads are used

    @classmethod
    def of(cls, directory: Path, checkpoint: Mapping[str, str], numeric: Mapping[str, Any]) -> "Rerun":
        """Opens a checkpoint. InputError unless its files have the recorded digests."""
        found = file_digests(directory)
        if found != dict(checkpoint):
            names = sorted(name for name in {*found, *checkpoint} if found.get(name) != checkpoint.get(name))
            raise InputError(f"{directory}: expected the recorded checkpoint, found another {', '.join(names)}")
        return cls(directory, numeric)

    def contracts(self) -> dict[str, NumericContract]:
        """Returns every attention kernel with the plain linear kernel, then the short forms with another linear kernel,
        without those that this machine cannot run."""
        given = {
            "dtype": self.numeric["dtype"],
            "device": self.numeric.get("device", "cpu"),
            "threads": self.numeric.get("threads", DEFAULT_THREADS),
            "reduced_precision": self.numeric.get("bf16_reduced_precision_reduction", True),
        }
        found = {name: NumericContract(**given, attention=name, linear="plain") for name in ATTENTION_KERNELS}
        for name, (_, linear) in KERNELS.items():
            if linear != "plain":
                found[name] = NumericContract(**given, kernels=name)
        without = left_out(found, open_checkpoint(self.directory).config, "experiments.crosscheck")
        return {name: one for name, one in found.items() if name not in without}

    def boundaries(self, construction: str, tokens: list[int]) -> Iterator[tuple[str, Decoder, Boundary]]:
        """Yields (kernel, model, the construction of these tokens), one model in memory at a time.

        A live cache is computed as incremental: the same calls, with the tokens given instead of chosen.
        """
        for name, numeric in self.contracts().items():
            model = load_model(self.directory, numeric)
            yield name, model, self._build(model, construction, tokens)

    def trace(self, construction: str, tokens: list[int], kernel: str, last: int | None = None) -> Trace:
        """Returns every numeric step of the construction under one kernel. InputError where memory is too small."""
        model = load_model(self.directory, self.contracts()[kernel])
        require_room(model.config, model.numeric.dtype, min(last or len(tokens), len(tokens)))
        trace = Trace(last)
        self._build(model, construction, tokens, observe=trace.observe)
        return trace

    def _build(self, model: Decoder, construction: str, tokens: list[int], **more: Any) -> Boundary:
        """Returns the boundary. InputError for a construction that needs more than tokens."""
        state = State.from_tokens(Contract.load(self.directory), tokens)
        if construction in TOKEN_BY_TOKEN:
            return build_incremental(model, state, **more)
        if construction in ONE_CALL:
            return build_prefill(model, state, **more)
        expected = "live, incremental or prefill to compute again"
        raise InputError(f"construction: expected {expected}, found {construction!r}")


@dataclass
class Finding:
    """The explanation of one differing construction."""

    construction: str
    notes: list[str] = field(default_factory=list)
    first: Difference | None = None  # the first differing step
    exact_step: bool = False  # whether `first` comes from a trace; else from what a boundary keeps
    kernels: dict[str, list[str]] = field(default_factory=dict)  # side: the kernels that have its bits
    tried: list[str] = field(default_factory=list)  # all kernels that were computed

    def lines(self) -> list[str]:
        """Returns the finding as lines of text."""
        shown = [f"first differing step {self.first.line()}"] if self.first is not None else []
        for letter, names in self.kernels.items():
            under = ", ".join(names) or f"none ({', '.join(self.tried)} tried)"
            shown.append(f"{letter} is equal under {under} of ours")
        return [f"{self.construction}: {line}" for line in [*self.notes, *shown]]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "first": self.first and self.first.as_dict(), "lines": self.lines()}


def explain_files(pair: FilePair, rerun: Rerun | None) -> Finding:
    """Returns the finding for two files that differ."""
    mine, theirs = (side.header["construction"] for side in (pair.left, pair.right))
    name = mine if mine == theirs else f"{mine} against {theirs}"
    finding = Finding(name, [*pair.notes, *pair.only], pair.first, exact_step=pair.kind == "trace")
    if pair.first is None:
        return finding
    finding.notes.append(f"{pair.differing_steps} of {pair.steps} tensors differ")
    if rerun is not None:
        finding.tried = list(rerun.contracts())
        for letter, stored in zip(LETTERS, (pair.left, pair.right)):
            finding.kernels[letter] = _kernels_of_file(stored, rerun, finding.tried)
        if mine == theirs:
            step_from_kernels(finding, rerun, mine, pair.left.header["tokens"])
    return finding


def _kernels_of_file(stored: Stored, rerun: Rerun, tried: list[str]) -> list[str]:
    """Returns the kernels under which every tensor of the file is computed again."""
    given, names = (stored.header["construction"], stored.header["tokens"]), stored.names
    if stored.header["schema"] == BOUNDARY:
        computed = ((kernel, boundary.named_tensors()) for kernel, _, boundary in rerun.boundaries(*given))
    else:
        last = stored.entries[names[0]].shape[1]
        computed = ((kernel, rerun.trace(*given, kernel, last).tensors()) for kernel in tried)
    return [
        kernel
        for kernel, tensors in computed
        if all(name in tensors and same_bits(tensors[name].cpu(), stored.tensor(name)) for name in names)
    ]


def step_from_kernels(finding: Finding, rerun: Rerun, construction: str, tokens: list[int]) -> None:
    """Adds the first differing step of two kernels' traces, where each side has the bits of another kernel."""
    kernels = [finding.kernels[letter] for letter in LETTERS]
    if finding.exact_step or not all(kernels) or set(kernels[0]) & set(kernels[1]):
        return
    try:
        mine, theirs = (in_memory(rerun.trace(construction, tokens, names[0]).tensors()) for names in kernels)
    except InputError as error:
        finding.notes.append(str(error))
        return
    step, _, _ = first_step(mine, theirs, len(tokens), by_slot=construction in TOKEN_BY_TOKEN)
    if step is not None:
        finding.first, finding.exact_step = step, True
        finding.notes.append("this step is of both sides computed again here")


def explain_row(left: Run, right: Run, row: str, rerun: Rerun | None) -> list[Finding]:
    """Returns a finding per arm whose boundary or suffix differs in row `row`; none for a row without prefix tokens."""
    rows = left.rows[row], right.rows[row]
    if any("tokens" not in side.get("prefix", {}) for side in rows):
        return []
    tokens = rows[0]["prefix"]["tokens"]
    at = first_unequal(tokens, rows[1]["prefix"]["tokens"])
    if at is not None:
        return [_prefix_finding(left, right, row, at)]
    common = [name for name in rows[0]["arms"] if name in rows[1]["arms"] and not _repeats(rows, name)]
    findings = [_arm_finding(left, right, row, arm, rerun) for arm in common]
    return [finding for finding in findings if finding is not None]


def _repeats(rows: Sides, arm: str) -> bool:
    """Returns whether the arm is a replica equal to its original on both sides, whose finding it would repeat."""
    original = arm.removesuffix("_replica")
    pairs = [(row["arms"][arm], row["arms"].get(original, {})) for row in rows]
    same = all(a[key] == b.get(key) for a, b in pairs for key in BITS)
    return original != arm and same and all(a[key] == b.get(key) for a, b in pairs for key in SUFFIX)


def _arm_finding(left: Run, right: Run, row: str, arm: str, rerun: Rerun | None) -> Finding | None:
    """Returns the finding of one arm, from saved tensors and computed again; None where nothing differs."""
    sides = left.rows[row]["arms"][arm], right.rows[row]["arms"][arm]
    finding, saved = Finding(arm), False
    moved = any(sides[0][key] != sides[1][key] for key in BITS)
    for folder in (TRACES, BOUNDARIES):
        paths = [run.path / folder / file_name(run.rows[row]["row"], arm) for run in (left, right)]
        if moved and finding.first is None and all(path.is_file() for path in paths):
            saved, pair = True, compare_files(*paths)
            finding.notes += pair.notes
            finding.first, finding.exact_step = pair.first, pair.first is not None and folder == TRACES
    for key, name in SUFFIX.items():
        at = first_unequal(*(side[key] for side in sides))
        if at is not None:
            a, b = (side[key][at] if at < len(side[key]) else "nothing" for side in sides)
            finding.notes.append(f"{name} first differ at token {at}: A {a}, B {b}")
    if not moved and not finding.notes:
        return None
    if rerun is not None and arm in (*TOKEN_BY_TOKEN, *ONE_CALL):
        tokens = left.rows[row]["prefix"]["tokens"]
        finding.kernels = {letter: [] for letter in LETTERS}
        for kernel, model, boundary in rerun.boundaries(arm, tokens):
            finding.tried.append(kernel)
            for letter, side in zip(LETTERS, sides):
                if _has_bits(side, model, boundary):
                    finding.kernels[letter].append(kernel)
        if moved:
            step_from_kernels(finding, rerun, arm, tokens)
    if moved and not saved and finding.first is None:
        finding.notes.append(
            "no saved tensors on both sides; new runs with --save-boundaries --trace ROW name the step"
        )
    return finding


def _has_bits(arm: ArmEntry, model: Decoder, boundary: Boundary) -> bool:
    """Returns whether a boundary and the suffix that it gives are the arm's."""
    if [arm[key] for key in BITS] != [cache_sha256(boundary.cache), tensor_sha256(boundary.logits)]:
        return False
    suffix = greedy_suffix(model, boundary)
    return list(suffix.tokens) == arm["suffix"] and list(suffix.margins) == arm["margins"]


def _prefix_finding(left: Run, right: Run, row: str, at: int) -> Finding:
    """Returns the finding for live prefixes that part: the token, its margins, the first differing step before it."""
    shown = []
    for run in (left, right):
        prefix, margins = run.rows[row]["prefix"]["tokens"], run.rows[row].get("prefix_margins", [])
        index = at - (len(prefix) - len(margins))
        margin = margins[index] if 0 <= index < len(margins) else None
        shown.append(f"{prefix[at] if at < len(prefix) else 'nothing'} (margin {margin})")
    note = f"the prefixes part at token {at}: A {shown[0]}, B {shown[1]}; arms are not comparable"
    mine, theirs = (run.path / TRACES / file_name(run.rows[row]["row"], "live") for run in (left, right))
    step = common_prefix_step(mine, theirs, at) if mine.is_file() and theirs.is_file() else None
    return Finding("live", [note], step)
