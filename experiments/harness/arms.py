"""Arms: the continuations of one boundary, and what must hold among them before any is compared."""

from collections.abc import Mapping
from dataclasses import dataclass

from cache.boundary import Boundary
from cache.isolation import disjoint, geometry
from decode.greedy import Suffix, greedy_suffix
from experiments.harness.progress import Progress
from minimodel.decoder import Decoder
from minimodel.numbers import same_bits


@dataclass(frozen=True)
class Arm:
    """One continuation: where it started, and what followed."""

    name: str
    boundary: Boundary
    suffix: Suffix


def continued(model: Decoder, boundaries: Mapping[str, Boundary], progress: Progress) -> list[Arm]:
    """Each boundary continued by the one greedy suffix decoder, in the order given."""
    arms = []
    for name, boundary in boundaries.items():
        progress.arm(name)
        arms.append(Arm(name, boundary, greedy_suffix(model, boundary)))
        progress.fed(len(arms[-1].suffix.tokens))
    return arms


def replica_exact(left: Arm, right: Arm) -> bool:
    """A replica pair agrees in functional state, cache, logits, suffix with its margins, and recorded geometry."""
    return (
        left.boundary.record.sha256() == right.boundary.record.sha256()
        and left.suffix == right.suffix
        and left.boundary.cache.equals(right.boundary.cache)
        and same_bits(left.boundary.logits, right.boundary.logits)
        and geometry(left.boundary.cache) == geometry(right.boundary.cache)
    )


def one_functional_state(arms: list[Arm]) -> bool:
    """All arms were shown the same tokens, roles, positions and visible keys, and hold them."""
    return len({(arm.boundary.record.sha256(), arm.boundary.state.tokens) for arm in arms}) == 1


def storage_disjoint(arms: list[Arm]) -> bool:
    """No two arms share a byte of K/V or logits."""
    return disjoint(*(arm.boundary.tensors() for arm in arms))
