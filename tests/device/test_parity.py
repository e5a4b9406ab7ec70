"""transformers and our decoder on one device: the same bits for each kernel and dtype, and what differs is the control.

`packed_gqa` and `repeat_kv` are SDPA as two ranges of releases call it; the installed one has the bits of one of them
in every construction, and of both in one call. `eager` is held to transformers' own eager attention.
"""

from dataclasses import replace

import pytest

from minimodel.load import load_model
from minimodel.numerics import DTYPES
from tests.device.conftest import UnderTest
from tests.hf import versions
from tests.hf.inputs import Request, six_blocks
from tests.hf.reference import Reference
from tests.hf.runs import Run, differing, run_ours, run_theirs

NARROW_AND_WIDE = ["bf16", "fp16", "fp32"]


def request_on(here: UnderTest) -> Request:
    """Two rows over all six blocks, on the device."""
    asked, device = six_blocks(here.checkpoint, content=here.content), here.numeric("bf16", "repeat_kv").torch_device
    assert asked.roles is not None and asked.mask is not None
    return replace(
        asked,
        input_ids=asked.input_ids.to(device),
        roles=asked.roles.to(device),
        position_ids=asked.position_ids.to(device),
        mask=asked.mask.to(device),
    )


def ours(here: UnderTest, dtype: str, kernels: str, construction: str) -> Run:
    return run_ours(load_model(here.checkpoint, here.numeric(dtype, kernels)), request_on(here), construction)


def theirs(here: UnderTest, dtype: str, attention: str, construction: str) -> Run:
    numeric = here.numeric(dtype, "repeat_kv")
    numeric.apply()
    reference = Reference(here.checkpoint, DTYPES[dtype], attention, numeric.torch_device)
    return run_theirs(reference, request_on(here), construction)


@pytest.mark.parametrize("construction", ["prefill", "incremental"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_transformers_has_our_bits(here, dtype, attention, construction):
    kernels = {"sdpa": versions.matching_kernel(), "eager": "eager/plain"}
    expected = theirs(here, dtype, attention, construction)
    assert differing(ours(here, dtype, kernels.pop(attention), construction), expected) == []
    (other,) = kernels.values()
    assert differing(ours(here, dtype, other, construction), expected), "the control: the other kernel"


@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_the_other_releases_kernel_has_its_bits_in_one_call(here, dtype):
    expected = theirs(here, dtype, "sdpa", "prefill")
    assert differing(ours(here, dtype, versions.other_kernel(), "prefill"), expected) == []
