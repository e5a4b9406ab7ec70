"""Comparison: the verdict is of bits, the numbers are of float64, and JSON can always hold them."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import KVCache, compare
from cache.drift import compare_tensors
from minimodel.bits import bits
from tests.cache.test_kv import CPU, filled
from tests.helpers import DTYPES, flip_bit, random_tensor, refused


def numpy_numbers(left, right):
    one, two = (np.concatenate([t.double().numpy().ravel() for t in side]) for side in (left, right))
    delta, norms = one - two, (np.linalg.norm(one), np.linalg.norm(two))
    return {
        "max_abs": np.abs(delta).max(),
        "mean_abs": np.abs(delta).mean(),
        "delta_l2": np.linalg.norm(delta),
        "left_l2": norms[0],
        "right_l2": norms[1],
        "relative_l2": np.linalg.norm(delta) / max(norms),
    }


@given(seed=st.integers(0, 1000), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_numbers_against_numpy_in_float64(seed, dtype, scale):
    """Paper, section 3.4: relative L2 = delta L2 over the larger of the two source norms."""
    left = filled(dtype=dtype, seed=seed)
    right = left.copy(8)
    for index, (_, _, tensor) in enumerate(right.tensors()):
        tensor.add_((random_tensor(*tensor.shape, seed=seed + index) * scale).to(dtype))
    report = compare(left, right).as_dict()
    sides = [[tensor for _, _, tensor in cache.tensors()] for cache in (left, right)]
    for key, value in numpy_numbers(*sides).items():
        assert report[key] == pytest.approx(value, rel=1e-9, abs=1e-300), key
    assert report["differing"] == sum(int((bits(a) != bits(b)).sum()) for a, b in zip(*sides))
    assert report["elements"] == sum(t.numel() for t in sides[0])
    for layer in range(2):
        for name, which in (("key", "keys"), ("value", "values")):
            pair = [[getattr(cache, which)(layer)] for cache in (left, right)]
            for key, value in numpy_numbers(*pair).items():
                assert report["layers"][layer][name][key] == pytest.approx(value, rel=1e-9, abs=1e-300)
    mirrored = compare(right, left).as_dict()
    assert (mirrored["relative_l2"], mirrored["left_l2"]) == (report["relative_l2"], report["right_l2"])


def test_equal_and_empty_caches_are_exact_with_zero_drift():
    for cache, elements in ((filled(), 320), (filled(0), 0)):
        report = compare(cache, cache.copy()).as_dict()
        assert report["exact"] and report["differing"] == 0 and report["first_difference"] is None
        assert report["relative_l2"] == report["max_abs"] == report["delta_l2"] == report["mean_abs"] == 0.0
        assert report["elements"] == elements and (report["left_l2"] > 0) == (elements > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_nan_is_exact_without_numbers(dtype):
    """pytorch/pytorch 137337 (case 17)."""
    left = random_tensor(6, dtype=dtype)
    left[2] = float("nan")
    report = compare_tensors(left, left.clone(), "x").as_dict()
    assert report["exact"] and not report["finite"] and report["max_abs"] is None
    other = left.clone()
    bits(other)[2] ^= 1
    assert other[2].isnan() and not compare_tensors(left, other, "x").exact
    assert not compare_tensors(left, random_tensor(6, dtype=dtype), "x").exact


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_json_never_holds_nan_or_infinity(value):
    left, right = filled(), filled(seed=1)
    left.keys(0)[0, 0, 0, 0] = value
    for pair in ((left, left), (left, right), (right, left)):
        report = compare(*pair).as_dict()
        assert not report["finite"] and report["relative_l2"] is None
        assert json.loads(json.dumps(report, allow_nan=False)) == json.loads(json.dumps(report))
    finite = compare(right, filled(seed=1)).as_dict()
    assert finite["finite"] and math.isfinite(finite["left_l2"])


PLACES = [(0, "keys", 4), (0, "values", 0), (0, "values", 3), (1, "keys", 0), (1, "values", 4)]


def test_first_difference_is_first_in_forward_order_then_by_slot():
    left, right = filled(), filled()
    for layer, which, slot in reversed(PLACES):  # each one earlier than those before it
        flip_bit(getattr(right, which)(layer), (1, 0, slot, 2))
        first = compare(left, right).first_difference
        assert first == {"layer": layer, "tensor": which.removesuffix("s"), "position": slot}
    flip_bit(right.keys(0), (0, 1, 4, 3))
    assert compare(left, right).layers[0][0].first == (4, 0, 1, 3), "slot, copy, head, component"


def test_first_of_plain_tensors_is_row_major():
    left = torch.zeros(3, 4)
    right = left.clone()
    right[2, 1] = right[1, 3] = 1
    assert compare_tensors(left, right, "logits").first == (1, 3)
    assert compare_tensors(left, left.clone(), "logits").first is None


def test_differences_are_taken_in_float64_over_the_larger_norm():
    assert compare_tensors(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), "x").sizes[0] == 2**-23
    big, bigger = torch.tensor([3e38]), torch.tensor([-3e38])
    assert compare_tensors(big, bigger, "x").sizes[0] == pytest.approx(6e38), "FP32 would overflow"
    signed = compare_tensors(torch.zeros(4), -torch.zeros(4), "x")
    assert signed.differing == 4 and signed.sizes[0] == 0.0, "zeros of two signs are a difference of no size"
    one, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    for pair, relative in (((one, zero), 1.0), ((zero, one), 1.0), ((zero, zero.clone()), 0.0)):
        assert compare_tensors(*pair, "x").as_dict()["relative_l2"] == relative


def test_another_geometry_is_refused_by_name():
    with refused("layer counts", "2", "1"):
        compare(filled(), KVCache((2, 2, 8, 4), torch.bfloat16, [CPU]))
    with refused("layer 0 key", "[2, 2, 5, 4]", "[2, 2, 4, 4]"):
        compare(filled(5), filled(4))
    with refused("layer 0 key", "bfloat16", "float16"):
        compare(filled(), filled(dtype=torch.float16))
