"""From arms to one ledger row: its entries, comparisons and gates. Every experiment spells them here."""

from collections.abc import Sequence
from typing import Any

from cache.boundary import Boundary
from cache.digest import cache_sha256, tensor_sha256
from cache.drift import compare, compare_tensors
from cache.isolation import cache_tensors, geometry
from decode.greedy import choose
from decode.state import State, token_digest
from experiments.harness.arms import Arm, copies_synchronised, functional_state_holds, storage_disjoint
from experiments.harness.tasks import RowName, Task
from minimodel.roles import MERGE
from stats.answers.score import score
from stats.endpoints import first_divergence


def prefix_entry(state: State) -> dict[str, Any]:
    """The row's `prefix`."""
    return {"tokens": list(state.tokens), "length": len(state), "sha256": state.sha256()}


def arm_entry(arm: Arm, task: Task | RowName) -> dict[str, Any]:
    """Returns the row's `arms[NAME]`. `margin` is the boundary's, `margins` has one entry per suffix token (null where
    it is forced). `post_decode_length`: tokens in the working cache after the suffix.

    `scored` and `correct` are there for a task only; a row known by name alone is not scored.
    """
    contract, suffix = arm.boundary.state.contract, arm.suffix
    text = contract.codec.decode(suffix.answer)
    argmax, margin = choose(arm.boundary.logits, contract.eligible[MERGE].to(arm.boundary.logits.device))
    return {
        "suffix": list(suffix.tokens),
        "suffix_sha256": token_digest(suffix.tokens),
        "merge": list(suffix.merge),
        "answer": list(suffix.answer),
        "answer_text": text,
        **_scored(text, task),
        "cache_sha256": cache_sha256(arm.boundary.cache),
        "logits_sha256": tensor_sha256(arm.boundary.logits),
        "argmax": argmax,
        "margin": margin,
        "margins": list(suffix.margins),
        "boundary_state_sha256": arm.boundary.record.sha256(),
        "suffix_state_sha256": suffix.functional_sha256,
        "geometry": _common_geometry(arm.boundary),
        "logits_geometry": geometry(arm.boundary.logits),
        "post_decode_length": suffix.cache_length,
    }


def _scored(text: str, task: Task | RowName) -> dict[str, Any]:
    if isinstance(task, RowName):
        return {}
    scored = score(text, task.answer, len(task.choices))
    return {"scored": scored.answer, "correct": scored.correct}


def _common_geometry(boundary: Boundary) -> dict[str, Any]:
    """Shape, stride and dtype that all K/V tensors of a boundary have, and their devices in order of layers."""
    entries = [geometry(tensor) for tensor in cache_tensors(boundary.cache)]
    tensors = [{k: entry[k] for k in ("shape", "stride", "dtype")} for entry in entries]
    assert all(entry == tensors[0] for entry in tensors), "the K/V tensors of one cache differ in geometry"
    devices = dict.fromkeys(str(entry["device"]) for entry in entries)
    return {"tensors": len(tensors), **tensors[0], "device": ",".join(devices)}


def comparison_entry(left: Arm, right: Arm, arms: dict[str, Any]) -> dict[str, Any]:
    """Returns the row's `comparisons["LEFT:RIGHT"]`.

    An answer is read in two ways. `answer_tokens_equal`: the answer blocks are equal token for token. `answer_equal`:
    they state the same letter or number, or state none in the same tokens; it and `correct_equal` are there for scored
    arms only. `suffix.tops`: both arms' best logit at the first divergence, null where a token is
    forced or missing; with the margins it says how many units in the last place the choice was apart.
    """
    mine, theirs = arms[left.name], arms[right.name]
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


def _scores_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, bool]:
    if "scored" not in mine:
        return {}
    same_answer = mine["scored"] == theirs["scored"]
    if mine["scored"] is None and theirs["scored"] is None:
        same_answer = mine["answer"] == theirs["answer"]
    return {"answer_equal": same_answer, "correct_equal": mine["correct"] == theirs["correct"]}


def first_token_is_argmax(arm: Arm, arms: dict[str, Any]) -> bool:
    """The suffix starts with the eligible argmax of the arm's boundary logits."""
    return arm.suffix.tokens[0] == arms[arm.name]["argmax"]


def row_entry(
    task: Task | RowName,
    index: int,
    state: State,
    arms: list[Arm],
    pairs: list[tuple[str, str]],
    gates: dict[str, bool],
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One whole ledger row. `gates` are the experiment's own; those every row must pass are added here."""
    entries = {arm.name: arm_entry(arm, task) for arm in arms}
    named = {arm.name: arm for arm in arms}
    all_gates = {
        **gates,
        "functional_state": functional_state_holds(arms),
        "storage_disjoint": storage_disjoint(arms),
        "copies_synchronised": copies_synchronised(arms),
        "argmax": all(first_token_is_argmax(arm, entries) for arm in arms),
    }
    return {
        "row": task.id,
        "index": index,
        "prefix": prefix_entry(state),
        **(extra or {}),
        "arms": entries,
        "comparisons": {f"{a}:{b}": comparison_entry(named[a], named[b], entries) for a, b in pairs},
        "gates": all_gates,
        "passed": all(all_gates.values()),
    }


def failed_row(
    task: Task | RowName, index: int, gate_names: list[str], reason: str, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The row of a request that failed closed: no arm of it is used."""
    return {
        "row": task.id,
        "index": index,
        **(extra or {}),
        "failure": reason,
        "arms": {},
        "comparisons": {},
        "gates": dict.fromkeys(gate_names, False),
        "passed": False,
    }
