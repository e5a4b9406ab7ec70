"""Recorded caches: no arm shares memory with another, and a written one fails the row."""

from pathlib import Path

import pytest
import torch

from decode.contract import Contract
from decode.greedy import RowFailure
from decode.state import State
from tests.hf import recording, versions
from tests.hf.reference import Reference


@pytest.fixture(scope="module")
def reference(study: Path) -> Reference:
    return Reference(study / "checkpoint", torch.bfloat16)


def test_no_arm_shares_memory_with_another(reference: Reference, study: Path) -> None:
    contract = Contract.load(study / "checkpoint")
    live = recording.record_live(reference, State.prompt(contract, "Which?", ["a", "b"]))
    recording.require_disjoint([live, recording.replica(live)])
    with pytest.raises(RowFailure, match="storage of its own"):
        recording.require_disjoint([live, live])


def test_a_cache_written_by_a_continuation_fails_the_row(reference: Reference, study: Path) -> None:
    contract = Contract.load(study / "checkpoint")
    live = recording.record_live(reference, State.prompt(contract, "Which?", ["a", "b"]))
    recording.record_suffix(reference, live)
    with torch.inference_mode():
        versions.keys_and_values(live.cache)[1][0][:, 0, 3, 5] += 1
    with pytest.raises(RowFailure, match="expected the boundary's bits"):
        recording.record_suffix(reference, live)
