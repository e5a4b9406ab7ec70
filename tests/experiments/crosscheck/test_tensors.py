"""The first element in which two tensors differ, and by how many units in the last place."""

import torch

from experiments.crosscheck.tensors import first_difference, ulp_distance


def test_ulp_distance_and_values():
    def one(value, dtype=torch.bfloat16):
        return torch.tensor(value, dtype=dtype)

    assert ulp_distance(one(1.0), one(1.0078125)) == 1
    assert ulp_distance(one(0.0), one(-0.0)) == 0
    assert ulp_distance(one(2.0**-133), one(-(2.0**-133))) == 2  # the smallest BF16 values on both sides of zero
    assert ulp_distance(one(1.0, torch.float64), one(2.0, torch.float64)) == 1 << 52
    assert ulp_distance(one(1.0), one(float("nan"))) is None
    left = torch.zeros(1, 4, 6)
    right = left.clone()
    right[0, 2, 5] = -0.0
    found = first_difference("layers.3.self_attn.q_proj", left, right, stop=14, head_dim=3)
    assert found is not None and (found.layer, found.head, found.position, found.component) == (3, 1, 12, 2)
    assert (found.left_bits, found.right_bits, found.ulp, found.differing) == ("0x00000000", "0x80000000", 0, 1)
    rotated = torch.zeros(1, 2, 4, 3)
    other = rotated.clone()
    other[0, 1, 0, 2] = other[0, 0, 3, 0] = 1.0
    found = first_difference("layers.0.self_attn.k_rotary", rotated, other, stop=4, head_dim=3)
    assert found is not None and (found.head, found.position, found.component, found.differing) == (1, 0, 2, 2)
    assert first_difference("norm", left, left.clone(), 4, None) is None
