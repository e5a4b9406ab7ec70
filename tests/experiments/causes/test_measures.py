"""One query alone against all in one call: the invariant kernel never differs, one that counts its rows is caught."""

import pytest
import torch

from experiments.causes.measures import LENGTH, parts_of_eager, random_inputs, rows_alone
from minimodel.attention import ATTENTION_KERNELS, eager
from minimodel.bits import bits, same_bits
from tests.conftest import numeric

PARTS = ["eager, scores", "eager, softmax", "eager, product with the values"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_invariant_kernel_gives_every_query_its_bits_alone(bf16, dtype):
    found = rows_alone(bf16.config, numeric(dtype), ["blocked", "eager"])
    assert list(found) == ["blocked", "eager", *PARTS]
    assert found["blocked"] == {"rows": LENGTH, "differing": 0}


@pytest.mark.parametrize("row", [0, 7, LENGTH - 1])
def test_one_bit_in_one_query_of_a_large_call_is_counted_once(bf16, monkeypatch, row):
    def one_by_one(query, keys, values, mask, scaling):
        length, before = query.shape[2], keys.shape[2] - query.shape[2]
        rows = [
            eager(query[:, :, i : i + 1], *(x[:, :, : before + i + 1] for x in (keys, values)), None, scaling)
            for i in range(length)
        ]
        out = torch.cat(rows, dim=1)
        if length > 1:
            bits(out)[0, row, 0, 0] ^= 1
        return out

    monkeypatch.setitem(ATTENTION_KERNELS, "one_by_one", one_by_one)
    assert rows_alone(bf16.config, numeric("bf16"), ["one_by_one"]) == {"one_by_one": {"rows": LENGTH, "differing": 1}}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_parts_of_eager_are_eager(bf16, dtype):
    inputs = random_inputs(bf16.config, numeric(dtype))
    whole = eager(*inputs).transpose(1, 2)
    together = parts_of_eager(inputs)[PARTS[-1]](0, LENGTH)
    assert same_bits(together, whole)
    bits(together)[0, 0, LENGTH - 1, 0] ^= 1
    assert not same_bits(together, whole)


def test_where_eager_differs_one_of_its_parts_does(bf16):
    found = rows_alone(bf16.config, numeric("fp32"), ["eager"])
    assert found["eager"]["differing"] == 0 or any(found[part]["differing"] for part in PARTS)
