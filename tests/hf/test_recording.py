"""Recorded rows: the greedy choice, arms that share no memory, a written cache that fails the row, and each gate."""

import pytest
import torch

from decode.contract import Contract
from decode.greedy import alone
from decode.state import State
from experiments.run.progress import Progress
from experiments.run.tasks import Task
from minimodel.bits import RowFailure, bits
from tests.hf import record, recording, versions
from tests.hf.reference import Reference


@pytest.mark.parametrize("dtype_", [torch.bfloat16, torch.float32])
def test_pick(dtype_):
    logits = torch.tensor([0.5, 2.0, 1.0, 2.0, 7.0], dtype=dtype_).expand(2, -1).contiguous()
    eligible = torch.tensor([True, True, True, True, False])
    assert recording.pick(logits, eligible) == (1, 0.0, 2.0), "a tie goes to the lowest id, eligibility comes first"
    eligible[1] = False
    assert recording.pick(logits, eligible) == (3, 1.0, 2.0)
    unequal = logits.clone()
    unequal[1, 0] = 0.75
    with pytest.raises(RowFailure, match="physical copies differ"):
        recording.pick(unequal, eligible)
    with pytest.raises(RowFailure, match="NaN or infinity"):
        recording.pick(torch.full((2, 5), float("nan"), dtype=dtype_), eligible)


@pytest.fixture(scope="module")
def reference(study):
    return Reference(study / "checkpoint", torch.bfloat16)


TASK = Task("t", "Which?", ("a", "b"), "A")


@pytest.fixture(scope="module")
def prompt(study):
    return State.prompt(Contract.load(study / "checkpoint"), TASK.question, TASK.choices)


def test_arms_share_no_memory_and_a_cache_written_by_a_continuation_fails_the_row(reference, prompt):
    live = recording.record_live(reference, prompt)
    recording.require_disjoint([live, recording.replica(live)])
    with pytest.raises(RowFailure, match="separate storage"):
        recording.require_disjoint([live, live])
    recording.record_suffix(reference, live)
    with torch.inference_mode():
        versions.keys_and_values(live.cache)[1][0][:, 0, 3, 5] += 1
    with pytest.raises(RowFailure, match="expected the boundary's bits"):
        recording.record_suffix(reference, live)


def faulty_role(patch):
    """Another role at transformers' entry in slot 5, in both copies."""
    own = Reference.hidden

    def hidden(self, tokens, roles, positions, *more):
        return own(self, tokens, torch.where(positions == 5, 5, roles), positions, *more)

    patch.setattr(Reference, "hidden", hidden)


def faulty_copy(construction):
    """One bit of a replica, the same in both copies."""

    def fault(patch):
        name = "record_prefill" if construction == "prefill" else "replica"
        own, calls = getattr(record, name), []

        def flipped(*given):
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


def gates(reference, prompt):
    recorded = record.IncrementalRecording(reference, [TASK], [prompt])
    return alone(recorded.row(0, Progress(1, 0, quiet=True).row("a")))["gates"]


def test_a_right_recording_passes_every_gate(reference, prompt):
    assert all(gates(reference, prompt).values())


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        ("functional_state", faulty_role),
        ("replica_live", faulty_copy("live")),
        ("replica_prefill", faulty_copy("prefill")),
        ("replica_incremental", faulty_copy("incremental")),
    ],
)
def test_a_gate_of_a_recording_fails_on_its_fault(reference, prompt, gate, fault):
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert [name for name, passed in gates(reference, prompt).items() if not passed] == [gate]
