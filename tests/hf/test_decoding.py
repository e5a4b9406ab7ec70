"""The recorder's greedy choice: ties, eligibility, copies that differ, and logits that are not finite."""

import pytest
import torch

from minimodel.bits import RowFailure
from tests.hf.decoding import pick


@pytest.mark.parametrize("dtype_", [torch.bfloat16, torch.float32])
def test_pick(dtype_):
    logits = torch.tensor([0.5, 2.0, 1.0, 2.0, 7.0], dtype=dtype_).expand(2, -1).contiguous()
    eligible = torch.tensor([True, True, True, True, False])
    assert pick(logits, eligible) == (1, 0.0, 2.0), "a tie goes to the lowest id, eligibility comes first"
    eligible[1] = False
    assert pick(logits, eligible) == (3, 1.0, 2.0)
    unequal = logits.clone()
    unequal[1, 0] = 0.75
    with pytest.raises(RowFailure, match="physical copies differ"):
        pick(unequal, eligible)
    with pytest.raises(RowFailure, match="NaN or infinity"):
        pick(torch.full((2, 5), float("nan"), dtype=dtype_), eligible)
