"""An experiment: how a row of it is decoded, the gates that the row must pass, its ledger entry, and its endpoints.

The walk of one row is `Experiment.row`: decode, check every gate, return the entry. Most experiments are continuations
of boundaries of one prefix, called arms (`ArmExperiment`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from cache.boundary import Boundary
from cache.digest import cache_sha256, tensor_sha256
from cache.drift import compare, compare_tensors
from cache.isolation import cache_tensors, disjoint, geometry
from decode.greedy import Steps, Suffix, choose, suffix_steps
from decode.record import derived_sha256
from decode.state import State, token_digest
from experiments.run.inputs import Models
from experiments.run.progress import RowProgress
from experiments.run.records import ArmEntry, Comparison, Gates, PrefixEntry, Row, RowBody, RowExtra, Summary
from experiments.run.tasks import Prefix, Task, longest_row
from minimodel.bits import COPIES, equal_copies, same_bits
from minimodel.decoder import Decoder
from minimodel.roles import MERGE
from stats.answers.score import stated_answer
from stats.endpoints import first_divergence

Made = TypeVar("Made")  # what decoding a row leaves for its gates and its entry
Check = TypeVar("Check", bound=Callable[[Any, Any], bool])


def gate(check: Check) -> Check:
    """Marks a method `check(self, made) -> bool` as a gate, under the method's name."""
    check.__dict__["gate"] = True
    return check


def replica_gate(name: str) -> Callable[[Any, Any], bool]:
    """Returns the gate that arm NAME and NAME_replica agree in every bit."""
    return gate(lambda experiment, made: replica_exact(made[name], made[f"{name}_replica"]))


# the bank's tokens, and what follows from them alone, entered every construction
bank_prefix: Callable[[Any, Any], bool] = gate(
    lambda experiment, made: prefix_holds(made.all, experiment.state(made.index).tokens)
)


class Experiment(ABC, Generic[Made]):
    """One experiment with its inputs, opened and checked. Rows are numbered in the manifest's row order."""

    decoder: Decoder  # of every row, where `model` is not overridden
    tasks: Sequence[Task | Prefix]  # a prefix where no expected answer is read
    states: Sequence[State]  # that each task's row starts from: its prompt, or a boundary prefix

    @classmethod
    def gates(cls) -> list[str]:
        """Returns the names of the gates: the class's own first, then those of the classes that it extends."""
        marked = [name for one in cls.__mro__ for name, check in vars(one).items() if hasattr(check, "gate")]
        return list(dict.fromkeys(marked))

    def row(self, index: int, progress: RowProgress) -> Steps[Row]:
        """Yields the steps of one row and returns its ledger entry. RowFailure where the request fails closed."""
        made = yield from self.decode(index, progress)
        return self.checked_row(index, made)

    def checked_row(self, index: int, made: Made) -> Row:
        """Returns the ledger entry of a decoded row, with the verdict of every gate."""
        gates = {name: bool(getattr(self, name)(made)) for name in self.gates()}
        return self._whole(index, self.entry(index, made), gates)

    def failed_row(self, index: int, reason: str) -> Row:
        """Returns the entry of a row that failed closed: no arm of it is used, and no gate holds."""
        entry: RowBody = {**self.identity(index), "failure": reason, "arms": {}, "comparisons": {}}
        return self._whole(index, entry, dict.fromkeys(self.gates(), False))

    def _whole(self, index: int, entry: RowBody, gates: Gates) -> Row:
        passed = all(gates.values())
        return {"row": self.task(index).id, "index": index, **entry, "gates": gates, "passed": passed}

    def model(self, index: int) -> Decoder:
        """Returns the decoder of row `index`, loaded."""
        return self.decoder

    def task(self, index: int) -> Task | Prefix:
        return self.tasks[index % len(self.tasks)]

    def state(self, index: int) -> State:
        return self.states[index % len(self.tasks)]

    @property
    def longest(self) -> int:
        """The most tokens that any row's cache can hold."""
        return longest_row(self.states)

    def part(self, index: int) -> str:
        """Returns the part of the run that the row belongs to. Rows of different parts are not decoded together."""
        return ""

    def identity(self, index: int) -> RowExtra:
        """Returns the fields beside `row` and `index` that stand also in a row that failed closed."""
        return {}

    @abstractmethod
    def decode(self, index: int, progress: RowProgress) -> Steps[Made]:
        """Yields the steps of everything that a row decodes; returns what its gates and its entry read."""

    @abstractmethod
    def entry(self, index: int, made: Made) -> RowBody:
        """Returns the fields of a decoded row between its name and its gates."""

    @abstractmethod
    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns summary.json from all rows."""

    @abstractmethod
    def closing(self, summary: Summary) -> list[str]:
        """Returns the lines for stdout with which a run ends."""

    def notes(self) -> list[str]:
        """Returns lines for stderr, once all rows are there."""
        return []


@dataclass(frozen=True)
class OneDecoder(Experiment[Made]):
    """Rows that start from discrete states, all under one decoder."""

    decoder: Decoder
    tasks: Sequence[Task | Prefix]
    states: Sequence[State]


@dataclass(frozen=True)
class Arm:
    """One continuation."""

    boundary: Boundary  # where it started
    suffix: Suffix  # what followed


@dataclass(frozen=True)
class Arms:
    """The arms of one row, decoded."""

    index: int  # the row's
    arms: dict[str, Arm]  # by name, in the experiment's order

    def __getitem__(self, name: str) -> Arm:
        return self.arms[name]

    @property
    def all(self) -> list[Arm]:
        return list(self.arms.values())

    @property
    def state(self) -> State:
        """The prefix."""
        return self.all[0].boundary.state

    def suffixes(self) -> dict[str, list[int]]:
        return {name: list(arm.suffix.tokens) for name, arm in self.arms.items()}


class ArmExperiment(Experiment[Arms]):
    """An experiment whose rows are continuations of boundaries of one prefix."""

    arms: ClassVar[tuple[str, ...]]  # in the order in which they are decoded
    pairs: ClassVar[tuple[tuple[str, str], ...]]  # what is compared

    @abstractmethod
    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        """Yields the steps that build the boundary of every arm; returns them in the order of `arms`."""

    def decode(self, index: int, progress: RowProgress) -> Steps[Arms]:
        progress.arm("boundary")
        boundaries = yield from self.boundaries(index, progress)
        arms = yield from continued(self.model(index), dict(zip(self.arms, boundaries, strict=True)), progress)
        return Arms(index, arms)

    functional_state = gate(lambda self, made: functional_state_holds(made.all))
    storage_disjoint = gate(lambda self, made: storage_disjoint(made.all))
    copies_synchronised = gate(lambda self, made: copies_synchronised(made.all))

    @gate
    def argmax(self, made: Arms) -> bool:
        """Every suffix starts with the eligible argmax of its boundary's logits."""
        return all(arm.suffix.tokens[0] == eligible_choice(arm.boundary)[0] for arm in made.all)

    def extra(self, made: Arms) -> RowExtra:
        """Returns the fields that this experiment adds to a row."""
        return self.identity(made.index)

    def entry(self, index: int, made: Arms) -> RowBody:
        task = self.task(index)
        arms = {name: arm_entry(arm, task) for name, arm in made.arms.items()}
        extra = self.extra(made)
        return {
            "prefix": prefix_entry(made.state),
            **extra,
            "arms": arms,
            "comparisons": {f"{a}:{b}": comparison_entry(made[a], made[b], arms[a], arms[b]) for a, b in self.pairs},
        }


@dataclass(frozen=True)
class Crossed(ArmExperiment):
    """Every prefix under every numeric contract, contracts outermost, so that each model is loaded once."""

    models: Models  # by the contract's name
    tasks: Sequence[Task]
    states: Sequence[State]

    factor: ClassVar[Literal["dtype", "cell"]]  # the row's field that names the contract

    def order(self) -> list[str]:
        """Returns the manifest's `row_order`."""
        return [f"{name}/{task.id}" for name in self.models.numeric for task in self.tasks]

    def part(self, index: int) -> str:
        return list(self.models.numeric)[index // len(self.tasks)]

    def model(self, index: int) -> Decoder:
        return self.models.at(self.part(index))

    def identity(self, index: int) -> RowExtra:
        return {"dtype": self.part(index)} if self.factor == "dtype" else {"cell": self.part(index)}


def continued(model: Decoder, boundaries: Mapping[str, Boundary], progress: RowProgress) -> Steps[dict[str, Arm]]:
    """Decodes the greedy suffix of each boundary, one after the other in the order given."""
    arms = {}
    for name, boundary in boundaries.items():
        progress.arm(name)
        suffix = yield from suffix_steps(model, boundary)
        arms[name] = Arm(boundary, suffix)
        progress.fed(len(suffix.tokens))
    return arms


def replica_exact(left: Arm, right: Arm) -> bool:
    """Returns whether a replica pair agrees in functional state, in the bits and geometry of cache and logits, and in
    the suffix with its margins.
    """
    mine, theirs = left.boundary.named_tensors(), right.boundary.named_tensors()
    return (
        left.boundary.record.sha256() == right.boundary.record.sha256()
        and left.suffix == right.suffix
        and mine.keys() == theirs.keys()
        and all(same_bits(mine[name], theirs[name]) for name in mine)
        and all(geometry(mine[name]) == geometry(theirs[name]) for name in mine)
    )


def prefix_holds(arms: Sequence[Arm], tokens: Sequence[int]) -> bool:
    """Returns whether exactly these integer tokens, with the roles, positions and mask rows that follow from them
    alone, entered the decoder for every arm's boundary.
    """
    expected = derived_sha256(arms[0].boundary.state.contract, tokens)
    return all(arm.boundary.record.sha256() == expected and len(arm.boundary.cache) == len(tokens) for arm in arms)


def functional_state_holds(arms: Sequence[Arm]) -> bool:
    """Returns whether all arms hold one prefix, and what entered the decoder for it and for each arm's suffix follows
    from the integer tokens alone.
    """
    contract, prefix = arms[0].boundary.state.contract, arms[0].boundary.state.tokens
    suffixes = {arm.suffix.tokens for arm in arms}
    expected = {suffix: derived_sha256(contract, (*prefix, *suffix)) for suffix in suffixes}
    return (
        all(arm.boundary.state.tokens == prefix for arm in arms)
        and prefix_holds(arms, prefix)
        and all(arm.suffix.functional_sha256 == expected[arm.suffix.tokens] for arm in arms)
    )


def copies_synchronised(arms: Sequence[Arm]) -> bool:
    """Returns whether every arm holds two physical copies, which were given the same inputs and agree in every bit of
    cache and logits. (A suffix whose copies come to differ in a logit or in the cache raises RowFailure.)
    """
    return all(
        arm.suffix.synchronised
        and all(len(tensor) == COPIES and equal_copies(tensor) for tensor in arm.boundary.tensors())
        for arm in arms
    )


def storage_disjoint(arms: Sequence[Arm]) -> bool:
    """Returns whether no two arms share a byte of K/V or logits."""
    return disjoint(*(arm.boundary.tensors() for arm in arms))


def eligible_choice(boundary: Boundary) -> tuple[int, float]:
    """Returns the eligible argmax of the boundary logits and its margin."""
    return choose(boundary.logits, boundary.state.contract.eligible[MERGE].to(boundary.logits.device))


def prefix_entry(state: State) -> PrefixEntry:
    """Returns the row's `prefix`."""
    return {"tokens": list(state.tokens), "length": len(state), "sha256": state.sha256()}


def arm_entry(arm: Arm, task: Task | Prefix) -> ArmEntry:
    """Returns the row's `arms[NAME]`. A row without an expected answer is not scored."""
    suffix, boundary = arm.suffix, arm.boundary
    text = boundary.state.contract.codec.decode(suffix.answer)
    argmax, margin = eligible_choice(boundary)
    scored: ArmEntry = {}
    if isinstance(task, Task):
        stated = stated_answer(text, len(task.choices))
        scored = {"scored": stated, "correct": stated == task.answer}
    entries = [geometry(tensor) for tensor in cache_tensors(boundary.cache)]
    tensors = [{key: entry[key] for key in ("shape", "stride", "dtype")} for entry in entries]
    assert all(entry == tensors[0] for entry in tensors), "the K/V tensors of one cache differ in geometry"
    devices = ",".join(dict.fromkeys(str(entry["device"]) for entry in entries))  # in order of layers
    return {
        "suffix": list(suffix.tokens),
        "suffix_sha256": token_digest(suffix.tokens),
        "merge": list(suffix.merge),
        "answer": list(suffix.answer),
        "answer_text": text,
        **scored,
        "cache_sha256": cache_sha256(boundary.cache),
        "logits_sha256": tensor_sha256(boundary.logits),
        "argmax": argmax,
        "margin": margin,
        "margins": list(suffix.margins),
        "boundary_state_sha256": boundary.record.sha256(),
        "suffix_state_sha256": suffix.functional_sha256,
        "geometry": {"tensors": len(tensors), **tensors[0], "device": devices},
        "logits_geometry": geometry(boundary.logits),
        "post_decode_length": suffix.cache_length,
    }


def comparison_entry(left: Arm, right: Arm, mine: ArmEntry, theirs: ArmEntry) -> Comparison:
    """Returns the row's `comparisons["LEFT:RIGHT"]`. mine, theirs: the entries of the two arms."""
    at = first_divergence(left.suffix.tokens, right.suffix.tokens)
    tops = [arm.suffix.tops[at] if at is not None and at < len(arm.suffix.tops) else None for arm in (left, right)]
    scores: Comparison = {}
    if "scored" in mine:
        none = mine["scored"] is None and theirs["scored"] is None  # then the tokens are compared
        same = mine["answer"] == theirs["answer"] if none else mine["scored"] == theirs["scored"]
        scores = {"answer_equal": same, "correct_equal": mine["correct"] == theirs["correct"]}
    logits = compare_tensors(left.boundary.logits, right.boundary.logits, "boundary logits")
    return {
        "cache": compare(left.boundary.cache, right.boundary.cache).as_dict(),
        "logits": logits.as_dict(),
        "suffix": {"exact": at is None, "first_divergence": at, "tops": tops},
        "merge_equal": mine["merge"] == theirs["merge"],
        "answer_tokens_equal": mine["answer"] == theirs["answer"],
        **scores,
        "argmax_equal": mine["argmax"] == theirs["argmax"],
    }
