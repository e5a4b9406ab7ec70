"""Arms: the continuations of one boundary, and what must hold among them before any is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache.boundary import Boundary
from cache.isolation import disjoint, geometry
from decode.greedy import Steps, Suffix, suffix_steps
from decode.record import derived_sha256
from experiments.harness.progress import RowProgress
from minimodel.bits import COPIES, equal_copies, same_bits
from minimodel.decoder import Decoder


@dataclass(frozen=True)
class Arm:
    """One continuation: where it started, and what followed."""

    name: str
    boundary: Boundary
    suffix: Suffix


def continued(model: Decoder, boundaries: Mapping[str, Boundary], progress: RowProgress) -> Steps[list[Arm]]:
    """Continues each boundary by the one greedy suffix decoder, one after the other in the order given."""
    arms = []
    for name, boundary in boundaries.items():
        progress.arm(name)
        suffix = yield from suffix_steps(model, boundary)
        arms.append(Arm(name, boundary, suffix))
        progress.fed(len(suffix.tokens))
    return arms


def replica_exact(left: Arm, right: Arm) -> bool:
    """A replica pair agrees in functional state, in the bits and geometry of cache and logits, and in the suffix with
    its margins.
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
    """Exactly these integer tokens, with the roles, positions and mask rows that follow from them alone, entered the
    decoder for every arm's boundary.
    """
    expected = derived_sha256(arms[0].boundary.state.contract, tokens)
    return all(arm.boundary.record.sha256() == expected and len(arm.boundary.cache) == len(tokens) for arm in arms)


def functional_state_holds(arms: Sequence[Arm]) -> bool:
    """All arms hold one prefix, and what entered the decoder for it, and for each arm's suffix, is what the integer
    tokens alone call for.
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
    """Every arm holds two physical copies, which were given the same inputs and agree in every bit of cache and logits.

    (A suffix whose copies come to differ in a logit or in the cache raises RowFailure.)
    """
    return all(
        arm.suffix.synchronised
        and all(len(tensor) == COPIES and equal_copies(tensor) for tensor in arm.boundary.tensors())
        for arm in arms
    )


def storage_disjoint(arms: Sequence[Arm]) -> bool:
    """No two arms share a byte of K/V or logits."""
    return disjoint(*(arm.boundary.tensors() for arm in arms))
