"""Explains why one pair differs: the first differing step, and the named kernels under which our code has each side's
bits. From saved tensors where both sides have them, else computed again."""

from dataclasses import dataclass, field
from typing import Any

from cache.boundary import SCHEMA as BOUNDARY
from cache.digest import cache_sha256, tensor_sha256
from cache.storage import Stored
from decode.greedy import greedy_suffix
from experiments.crosscheck.compare import FilePair, common_prefix_step, compare_files, first_step, in_memory
from experiments.crosscheck.rerun import ONE_CALL, TOKEN_BY_TOKEN, Rerun
from experiments.crosscheck.tensors import Difference
from experiments.run.directory import Run
from experiments.run.ledger import first_unequal
from experiments.run.saving import BOUNDARIES, TRACES, file_name
from minimodel.bits import same_bits
from minimodel.errors import InputError

LETTERS = ("A", "B")


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


def explain_files(pair: FilePair, rerun: Rerun | None) -> Finding:
    """Returns the finding for two files that differ."""
    mine, theirs = (side.header["construction"] for side in (pair.left, pair.right))
    finding = Finding(
        mine if mine == theirs else f"{mine} against {theirs}", first=pair.first, exact_step=pair.kind == "trace"
    )
    finding.notes += functional_note(pair)
    finding.notes += [f"step {name} only in {letter}" for letter, names in pair.only.items() for name in names[:8]]
    if pair.first is not None:
        finding.notes.append(f"{pair.differing_steps} of {pair.steps} tensors differ")
    if rerun is not None and pair.first is not None:
        for letter, stored in zip(LETTERS, (pair.left, pair.right)):
            _match_file(finding, letter, stored, rerun)
        if mine == theirs:
            step_from_kernels(finding, rerun, mine, pair.left.header["tokens"])
    return finding


def functional_note(pair: FilePair) -> list[str]:
    """Returns a note where roles, positions or mask rows differ: then the cause is not rounding."""
    return [] if pair.functional_equal else ["functional state differs: other roles, positions or mask rows were shown"]


def _match_file(finding: Finding, letter: str, stored: Stored, rerun: Rerun) -> None:
    construction, tokens = stored.header["construction"], stored.header["tokens"]
    finding.kernels[letter], finding.tried = [], list(rerun.contracts())
    if stored.header["schema"] == BOUNDARY:
        for kernel, _, boundary in rerun.boundaries(construction, tokens):
            named = boundary.named_tensors()
            if set(named) == set(stored.names) and all(same_bits(named[n].cpu(), stored.tensor(n)) for n in named):
                finding.kernels[letter].append(kernel)
        return
    last = stored.entries[stored.names[0]].shape[1]
    for kernel in finding.tried:
        steps = rerun.trace(construction, tokens, kernel, last).tensors()
        if all(name in steps and same_bits(steps[name], stored.tensor(name)) for name in stored.names):
            finding.kernels[letter].append(kernel)


def step_from_kernels(finding: Finding, rerun: Rerun, construction: str, tokens: list[int]) -> None:
    """Adds the first differing step of two kernels' traces, where each side has the bits of a kernel of its own."""
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
    mine, theirs = left.rows[row], right.rows[row]
    if any("tokens" not in side.get("prefix", {}) for side in (mine, theirs)):
        return []
    at = first_unequal(mine["prefix"]["tokens"], theirs["prefix"]["tokens"])
    if at is not None:
        return [_prefix_finding(left, right, row, at)]
    findings = []
    for arm in (name for name in mine["arms"] if name in theirs["arms"] and not _repeats((mine, theirs), name)):
        sides = (mine["arms"][arm], theirs["arms"][arm])
        finding = Finding(arm)
        moved = any(sides[0][key] != sides[1][key] for key in ("cache_sha256", "logits_sha256"))
        saved = moved and _from_saved_files(finding, left, right, row, arm)
        finding.notes += _suffix_notes(*sides)
        if not moved and not finding.notes:
            continue
        if rerun is not None and arm in (*TOKEN_BY_TOKEN, *ONE_CALL):
            tokens = mine["prefix"]["tokens"]
            _match_arms(finding, sides, rerun, arm, tokens)
            if moved:
                step_from_kernels(finding, rerun, arm, tokens)
        if moved and not saved and finding.first is None:
            finding.notes.append(
                "no saved tensors on both sides; new runs with --save-boundaries --trace ROW name the step"
            )
        findings.append(finding)
    return findings


def _repeats(rows: tuple[dict[str, Any], dict[str, Any]], arm: str) -> bool:
    """Whether the arm is a replica identical to its original on both sides: its finding would be the original's."""
    original = arm.removesuffix("_replica")
    keys = ("cache_sha256", "logits_sha256", "suffix", "margins")
    pairs = [(row["arms"][arm], row["arms"].get(original, {})) for row in rows]
    return original != arm and all(one[key] == two.get(key) for one, two in pairs for key in keys)


def _from_saved_files(finding: Finding, left: Run, right: Run, row: str, arm: str) -> bool:
    """Adds the first difference of saved tensors. Returns whether both sides saved any of this arm."""
    saved = False
    for folder in (TRACES, BOUNDARIES):
        paths = [run.path / folder / file_name(run.rows[row]["row"], arm) for run in (left, right)]
        if all(path.is_file() for path in paths):
            saved = True
            pair = compare_files(*paths)
            finding.notes += functional_note(pair)
            if pair.first is not None:
                finding.first, finding.exact_step = pair.first, folder == TRACES
                break
    return saved


def _suffix_notes(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    notes = []
    for name, key in (("suffix", "suffix"), ("margins of the suffix", "margins")):
        at = first_unequal(mine[key], theirs[key])
        if at is not None:
            values = [side[key][at] if at < len(side[key]) else "nothing" for side in (mine, theirs)]
            notes.append(f"{name} first differ at token {at}: A {values[0]}, B {values[1]}")
    return notes


def _match_arms(
    finding: Finding, sides: tuple[dict[str, Any], dict[str, Any]], rerun: Rerun, arm: str, tokens: list[int]
) -> None:
    finding.kernels = {letter: [] for letter in LETTERS}
    for kernel, model, boundary in rerun.boundaries(arm, tokens):
        finding.tried.append(kernel)
        digests = {"cache_sha256": cache_sha256(boundary.cache), "logits_sha256": tensor_sha256(boundary.logits)}
        suffix = None
        for letter, side in zip(LETTERS, sides):
            if all(side[key] == digest for key, digest in digests.items()):
                suffix = suffix or greedy_suffix(model, boundary)
                if list(suffix.tokens) == side["suffix"] and list(suffix.margins) == side["margins"]:
                    finding.kernels[letter].append(kernel)


def _prefix_finding(left: Run, right: Run, row: str, at: int) -> Finding:
    """Returns the finding for live prefixes that part: the token, its margins, the first differing step before it."""
    finding = Finding("live")
    shown = []
    for run in (left, right):
        prefix, margins = run.rows[row]["prefix"]["tokens"], run.rows[row].get("prefix_margins", [])
        index = at - (len(prefix) - len(margins))
        margin = margins[index] if 0 <= index < len(margins) else None
        shown.append(f"{prefix[at] if at < len(prefix) else 'nothing'} (margin {margin})")
    finding.notes.append(f"the prefixes part at token {at}: A {shown[0]}, B {shown[1]}; arms are not comparable")
    mine, theirs = (run.path / TRACES / file_name(run.rows[row]["row"], "live") for run in (left, right))
    if mine.is_file() and theirs.is_file():
        finding.first = common_prefix_step(mine, theirs, at)
    return finding
