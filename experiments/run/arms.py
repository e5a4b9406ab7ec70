"""Arms: the continuations of one boundary. What must hold among them, and their entries in the ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache.boundary import Boundary
from cache.digest import cache_sha256, tensor_sha256
from cache.drift import compare, compare_tensors
from cache.isolation import cache_tensors, disjoint, geometry
from decode.greedy import Steps, Suffix, choose, suffix_steps
from decode.record import derived_sha256
from decode.state import State, token_digest
from experiments.run.progress import RowProgress
from experiments.run.records import ArmEntry, Comparison, PrefixEntry
from experiments.run.tasks import RowName, Task
from minimodel.bits import COPIES, equal_copies, same_bits
from minimodel.decoder import Decoder
from minimodel.roles import MERGE
from stats.answers.score import score
from stats.endpoints import first_divergence


@dataclass(frozen=True)
class Arm:
    """One continuation."""

    name: str  # its key in the row's `arms`
    boundary: Boundary  # where it started
    suffix: Suffix  # what followed


def continued(model: Decoder, boundaries: Mapping[str, Boundary], progress: RowProgress) -> Steps[dict[str, Arm]]:
    """Continues each boundary by the one greedy suffix decoder, one after the other in the order given."""
    arms = {}
    for name, boundary in boundaries.items():
        progress.arm(name)
        suffix = yield from suffix_steps(model, boundary)
        arms[name] = Arm(name, boundary, suffix)
        progress.fed(len(suffix.tokens))
    return arms


def replica_exact(left: Arm, right: Arm) -> bool:
    """Whether a replica pair agrees in functional state, in the bits and geometry of cache and logits, and in the
    suffix with its margins.
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
    """Whether exactly these integer tokens, with the roles, positions and mask rows that follow from them alone,
    entered the decoder for every arm's boundary.
    """
    expected = derived_sha256(arms[0].boundary.state.contract, tokens)
    return all(arm.boundary.record.sha256() == expected and len(arm.boundary.cache) == len(tokens) for arm in arms)


def functional_state_holds(arms: Sequence[Arm]) -> bool:
    """Whether all arms hold one prefix, and what entered the decoder for it, and for each arm's suffix, is what the
    integer tokens alone call for.
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
    """Whether every arm holds two physical copies, which were given the same inputs and agree in every bit of cache
    and logits. (A suffix whose copies come to differ in a logit or in the cache raises RowFailure.)
    """
    return all(
        arm.suffix.synchronised
        and all(len(tensor) == COPIES and equal_copies(tensor) for tensor in arm.boundary.tensors())
        for arm in arms
    )


def storage_disjoint(arms: Sequence[Arm]) -> bool:
    """Whether no two arms share a byte of K/V or logits."""
    return disjoint(*(arm.boundary.tensors() for arm in arms))


def eligible_choice(boundary: Boundary) -> tuple[int, float]:
    """Returns the eligible argmax of the boundary logits and its margin."""
    return choose(boundary.logits, boundary.state.contract.eligible[MERGE].to(boundary.logits.device))


def prefix_entry(state: State) -> PrefixEntry:
    """Returns the row's `prefix`."""
    return {"tokens": list(state.tokens), "length": len(state), "sha256": state.sha256()}


def arm_entry(arm: Arm, task: Task | RowName) -> ArmEntry:
    """Returns the row's `arms[NAME]`. A row known by name alone is not scored."""
    suffix, boundary = arm.suffix, arm.boundary
    text = boundary.state.contract.codec.decode(suffix.answer)
    argmax, margin = eligible_choice(boundary)
    return {
        "suffix": list(suffix.tokens),
        "suffix_sha256": token_digest(suffix.tokens),
        "merge": list(suffix.merge),
        "answer": list(suffix.answer),
        "answer_text": text,
        **_scored(text, task),
        "cache_sha256": cache_sha256(boundary.cache),
        "logits_sha256": tensor_sha256(boundary.logits),
        "argmax": argmax,
        "margin": margin,
        "margins": list(suffix.margins),
        "boundary_state_sha256": boundary.record.sha256(),
        "suffix_state_sha256": suffix.functional_sha256,
        "geometry": _common_geometry(boundary),
        "logits_geometry": geometry(boundary.logits),
        "post_decode_length": suffix.cache_length,
    }


def _scored(text: str, task: Task | RowName) -> ArmEntry:
    if isinstance(task, RowName):
        return {}
    scored = score(text, task.answer, len(task.choices))
    return {"scored": scored.answer, "correct": scored.correct}


def _common_geometry(boundary: Boundary) -> dict[str, Any]:
    """Returns shape, stride and dtype that all K/V tensors of a boundary have, and their devices in order of layers."""
    entries = [geometry(tensor) for tensor in cache_tensors(boundary.cache)]
    tensors = [{k: entry[k] for k in ("shape", "stride", "dtype")} for entry in entries]
    assert all(entry == tensors[0] for entry in tensors), "the K/V tensors of one cache differ in geometry"
    devices = dict.fromkeys(str(entry["device"]) for entry in entries)
    return {"tensors": len(tensors), **tensors[0], "device": ",".join(devices)}


def comparison_entry(left: Arm, right: Arm, mine: ArmEntry, theirs: ArmEntry) -> Comparison:
    """Returns the row's `comparisons["LEFT:RIGHT"]`. mine, theirs: the entries of the two arms."""
    divergence = first_divergence(left.suffix.tokens, right.suffix.tokens)
    logits = compare_tensors(left.boundary.logits, right.boundary.logits, "boundary logits")
    return {
        "cache": compare(left.boundary.cache, right.boundary.cache).as_dict(),
        "logits": logits.as_dict(),
        "suffix": {
            "exact": divergence is None,
            "first_divergence": divergence,
            "tops": [_at(arm.suffix.tops, divergence) for arm in (left, right)],
        },
        "merge_equal": mine["merge"] == theirs["merge"],
        "answer_tokens_equal": mine["answer"] == theirs["answer"],
        **_scores_equal(mine, theirs),
        "argmax_equal": mine["argmax"] == theirs["argmax"],
    }


def _at(values: Sequence[float | None], index: int | None) -> float | None:
    return values[index] if index is not None and index < len(values) else None


def _scores_equal(mine: ArmEntry, theirs: ArmEntry) -> Comparison:
    if "scored" not in mine:
        return {}
    same_answer = mine["scored"] == theirs["scored"]
    if mine["scored"] is None and theirs["scored"] is None:
        same_answer = mine["answer"] == theirs["answer"]
    return {"answer_equal": same_answer, "correct_equal": mine["correct"] == theirs["correct"]}
