"""Why one pair differs: the first differing step, and the named kernel that has each side's bits."""

from dataclasses import dataclass, field

from cache.boundary import SCHEMA as BOUNDARY
from cache.storage import Stored
from experiments.crosscheck.files import FilePair, InMemory, first_step
from experiments.crosscheck.rerun import TOKEN_BY_TOKEN, Rerun
from experiments.crosscheck.tensors import Difference
from minimodel.bits import same_bits
from minimodel.errors import InputError

LETTERS = ("A", "B")


@dataclass
class Finding:
    """What is known of one differing construction. kernels: of each side, the names that have its bits; `tried` all."""

    construction: str
    notes: list[str] = field(default_factory=list)
    first: Difference | None = None
    exact_step: bool = False  # `first` comes from a trace, and not only from what a boundary keeps
    kernels: dict[str, list[str]] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"first differing step {self.first.line()}"] if self.first is not None else []
        for letter, names in self.kernels.items():
            under = ", ".join(names) or f"none ({', '.join(self.tried)} tried)"
            shown.append(f"{letter} is equal under {under} of ours")
        return [f"{self.construction}: {line}" for line in [*self.notes, *shown]]


def explain_files(pair: FilePair, left: Stored, right: Stored, rerun: Rerun | None) -> Finding:
    """Of two files that differ."""
    mine, theirs = pair.construction
    finding = Finding(
        mine if mine == theirs else f"{mine} against {theirs}", first=pair.first, exact_step=pair.kind == "trace"
    )
    finding.notes += functional_note(pair)
    finding.notes += [f"step {name} only in A" for name in pair.only_left[:8]]
    finding.notes += [f"step {name} only in B" for name in pair.only_right[:8]]
    if pair.first is not None:
        finding.notes.append(f"{pair.differing_steps} of {pair.steps} tensors differ")
    if rerun is not None and pair.first is not None:
        for letter, stored in zip(LETTERS, (left, right)):
            _match_file(finding, letter, stored, rerun)
        if mine == theirs:
            step_from_kernels(finding, rerun, mine, left.header["tokens"])
    return finding


def functional_note(pair: FilePair) -> list[str]:
    """Other roles, positions or mask rows: a cause, and not a matter of rounding."""
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
    """Where each side is equal under a kernel, those kernels' traces are the sides' own: the first differing step."""
    kernels = [finding.kernels[letter] for letter in LETTERS]
    if finding.exact_step or not all(kernels) or set(kernels[0]) & set(kernels[1]):
        return
    try:
        mine, theirs = (InMemory(rerun.trace(construction, tokens, names[0]).tensors()) for names in kernels)
    except InputError as error:
        finding.notes.append(str(error))
        return
    by_slot = construction in TOKEN_BY_TOKEN
    step, _, _ = first_step(mine, theirs, len(tokens), by_slot)
    if step is not None:
        finding.first, finding.exact_step = step, True
        finding.notes.append("this step is of both sides computed again here")
