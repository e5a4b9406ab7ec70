"""An experiment: how a row of it is decoded, the gates that the row must pass, and its endpoints.

The walk of one row is `Experiment.row`: decode, check every gate, write the entry down.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from cache.boundary import Boundary
from decode.greedy import Steps
from decode.state import State
from experiments.run.arms import (
    Arm,
    arm_entry,
    comparison_entry,
    continued,
    copies_synchronised,
    eligible_choice,
    functional_state_holds,
    prefix_entry,
    replica_exact,
    storage_disjoint,
)
from experiments.run.progress import RowProgress
from experiments.run.records import Gates, Row, RowExtra, Summary
from experiments.run.tasks import RowName, Task
from minimodel.decoder import Decoder

Made = TypeVar("Made")  # what decoding a row leaves for its gates and its entry
Check = TypeVar("Check", bound=Callable[[Any, Any], bool])


def gate(check: Check) -> Check:
    """Marks a method `check(self, made) -> bool` as a gate, under the method's name."""
    check.__dict__["gate"] = True
    return check


class Experiment(ABC, Generic[Made]):
    """One experiment with its inputs, opened and checked. Rows are numbered in the manifest's row order."""

    @classmethod
    def gates(cls) -> list[str]:
        """Returns the names of the gates: the class's own first, then those of the classes that it extends."""
        marked = [name for one in cls.__mro__ for name, check in vars(one).items() if hasattr(check, "gate")]
        return list(dict.fromkeys(marked))

    def row(self, index: int, progress: RowProgress) -> Steps[Row]:
        """The steps of one row, which return its ledger entry. RowFailure where the request fails closed."""
        made = yield from self.decode(index, progress)
        return self.entry(index, made, {name: bool(getattr(self, name)(made)) for name in self.gates()})

    def failed_row(self, index: int, reason: str) -> Row:
        """Returns the entry of a row that failed closed: no arm of it is used, and no gate holds."""
        return {
            "row": self.task(index).id,
            "index": index,
            **self.identity(index),
            "failure": reason,
            "arms": {},
            "comparisons": {},
            "gates": dict.fromkeys(self.gates(), False),
            "passed": False,
        }

    @abstractmethod
    def model(self, index: int) -> Decoder:
        """Returns the decoder of row `index`, loaded."""

    @abstractmethod
    def task(self, index: int) -> Task | RowName:
        """Returns the row's task, or its name where its expected answer is not read."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens that any row's cache can hold."""

    def part(self, index: int) -> str:
        """Returns the part of the run that the row belongs to. Rows of different parts are not decoded together."""
        return ""

    def identity(self, index: int) -> RowExtra:
        """Returns the fields beside `row` and `index` that stand also in a row that failed closed."""
        return {}

    @abstractmethod
    def decode(self, index: int, progress: RowProgress) -> Steps[Made]:
        """The steps of everything that a row decodes."""

    @abstractmethod
    def entry(self, index: int, made: Made, gates: Gates) -> Row:
        """Returns the ledger entry of a decoded row."""

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
class Arms:
    """The arms of one row, decoded."""

    index: int  # the row's
    reached: int | None  # tokens of every boundary's cache before any suffix was decoded; None where they differ
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

    def replica_exact(self, name: str) -> bool:
        """Whether arm NAME and NAME_replica agree in every bit."""
        return replica_exact(self[name], self[f"{name}_replica"])

    def suffixes(self) -> dict[str, list[int]]:
        return {name: list(arm.suffix.tokens) for name, arm in self.arms.items()}


class ArmExperiment(Experiment[Arms]):
    """An experiment whose rows are continuations of boundaries of one prefix."""

    arms: ClassVar[tuple[str, ...]]  # in the order in which they are decoded
    pairs: ClassVar[tuple[tuple[str, str], ...]]  # what is compared

    @abstractmethod
    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        """The steps that build the boundary of every arm, in the order of `arms`."""

    def decode(self, index: int, progress: RowProgress) -> Steps[Arms]:
        progress.arm("boundary")
        boundaries = yield from self.boundaries(index, progress)
        reached = boundary_length(boundaries)
        named = dict(zip(self.arms, boundaries, strict=True))
        arms = yield from continued(self.model(index), named, progress)
        return Arms(index, reached, arms)

    @gate
    def functional_state(self, made: Arms) -> bool:
        return functional_state_holds(made.all)

    @gate
    def storage_disjoint(self, made: Arms) -> bool:
        return storage_disjoint(made.all)

    @gate
    def copies_synchronised(self, made: Arms) -> bool:
        return copies_synchronised(made.all)

    @gate
    def argmax(self, made: Arms) -> bool:
        """Every suffix starts with the eligible argmax of its boundary's logits."""
        return all(arm.suffix.tokens[0] == eligible_choice(arm.boundary)[0] for arm in made.all)

    def extra(self, made: Arms) -> RowExtra:
        """Returns the fields that this experiment adds to a row."""
        return self.identity(made.index)

    def entry(self, index: int, made: Arms, gates: Gates) -> Row:
        task = self.task(index)
        arms = {name: arm_entry(arm, task) for name, arm in made.arms.items()}
        extra = self.extra(made)
        return {
            "row": task.id,
            "index": index,
            "prefix": prefix_entry(made.state),
            **extra,
            "arms": arms,
            "comparisons": {f"{a}:{b}": comparison_entry(made[a], made[b], arms[a], arms[b]) for a, b in self.pairs},
            "gates": gates,
            "passed": all(gates.values()),
        }


def boundary_length(boundaries: Sequence[Boundary]) -> int | None:
    """Returns the tokens that every boundary's cache holds; None where they differ."""
    lengths = {len(boundary.cache) for boundary in boundaries}
    return lengths.pop() if len(lengths) == 1 else None
