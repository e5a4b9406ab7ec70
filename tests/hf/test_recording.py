"""Recorded rows: no arm shares memory with another, a written cache fails the row, and each gate its fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.contract import Contract
from decode.greedy import alone
from decode.state import State
from experiments.run.progress import Progress
from experiments.run.tasks import Task
from minimodel.bits import RowFailure, bits
from tests.hf import record, recording, versions
from tests.hf.reference import Reference


@pytest.fixture(scope="module")
def reference(study):
    return Reference(study / "checkpoint", torch.bfloat16)


def test_no_arm_shares_memory_with_another(reference, study):
    contract = Contract.load(study / "checkpoint")
    live = recording.record_live(reference, State.prompt(contract, "Which?", ["a", "b"]))
    recording.require_disjoint([live, recording.replica(live)])
    with pytest.raises(RowFailure, match="storage of its own"):
        recording.require_disjoint([live, live])


def test_a_cache_written_by_a_continuation_fails_the_row(reference, study):
    contract = Contract.load(study / "checkpoint")
    live = recording.record_live(reference, State.prompt(contract, "Which?", ["a", "b"]))
    recording.record_suffix(reference, live)
    with torch.inference_mode():
        versions.keys_and_values(live.cache)[1][0][:, 0, 3, 5] += 1
    with pytest.raises(RowFailure, match="expected the boundary's bits"):
        recording.record_suffix(reference, live)


def faulty_role(patch: pytest.MonkeyPatch) -> None:
    """Another role at transformers' entry in slot 5, in both copies."""
    own = Reference.hidden

    def hidden(self: Reference, tokens: Tensor, roles: Tensor, positions: Tensor, *more: Any) -> Tensor:
        return own(self, tokens, torch.where(positions == 5, 5, roles), positions, *more)

    patch.setattr(Reference, "hidden", hidden)


def faulty_copy(construction: str) -> Callable[[pytest.MonkeyPatch], None]:
    """One bit of a replica, the same in both copies."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        name = "record_prefill" if construction == "prefill" else "replica"
        own, calls = getattr(record, name), []

        def flipped(*given: Any) -> recording.Recorded:
            made = own(*given)
            calls.append(made)
            second = construction == "prefill" and len(calls) == 2
            if second or (name == "replica" and made.boundary.construction == construction):
                with torch.inference_mode():
                    for keys in (versions.keys_and_values(made.cache)[0][0], made.boundary.cache.keys(0)):
                        bits(keys)[:, 0, 3, 5] ^= 1
            return made

        patch.setattr(record, name, flipped)

    return fault


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        ("functional_state", faulty_role),
        ("replica_live", faulty_copy("live")),
        ("replica_prefill", faulty_copy("prefill")),
        ("replica_incremental", faulty_copy("incremental")),
    ],
)
def test_a_gate_of_a_recording_fails_on_its_fault(reference, study, gate, fault):
    task = Task("t", "Which?", ("a", "b"), "A")
    prompt = State.prompt(Contract.load(study / "checkpoint"), task.question, task.choices)

    def gates():
        recording = record.IncrementalRecording(reference, [task], [prompt])
        return alone(recording.row(0, Progress(1, 0, quiet=True).row("a")))["gates"]

    assert all(gates().values())
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert [name for name, passed in gates().items() if not passed] == [gate]
