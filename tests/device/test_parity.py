"""Bits on one device: transformers and our decoder, equal copies, constructions; invariance or its refusal in one line.

`packed_gqa` and `repeat_kv` are SDPA as two ranges of releases call it; the installed one has the bits of one of them
in every construction, and of both in one call. `eager` is compared with transformers' own eager attention.
"""

from dataclasses import replace

import pytest

from cache import build_incremental, build_live, build_prefill
from minimodel.errors import InputError
from minimodel.load import load_model
from minimodel.numerics import DTYPES
from tests.helpers import equal, flip_bit
from tests.hf import versions
from tests.hf.reference import Reference
from tests.hf.runs import differing, run_ours, run_theirs, six_blocks

# on the CPU tests/cache and tests/minimodel/test_selfcheck.py hold the same; there this checks the file's own steps
slow_on_the_cpu = pytest.mark.parametrize(
    "here", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"], indirect=True, scope="session"
)
every_dtype = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


@pytest.fixture(scope="module")
def fed(here):
    """Two rows over all six blocks, on the device."""
    made, device = six_blocks(here.checkpoint, content=here.content), here.numeric("bf16", "repeat_kv").torch_device
    tensors = ("input_ids", "roles", "position_ids", "mask")
    return replace(made, **{name: getattr(made, name).to(device) for name in tensors})


def ours(here, fed, dtype, kernels, construction):
    return run_ours(load_model(here.checkpoint, here.numeric(dtype, kernels)), fed, construction)


def theirs(here, fed, dtype, attention, construction):
    numeric = here.numeric(dtype, "repeat_kv")
    numeric.apply()
    reference = Reference(here.checkpoint, DTYPES[dtype], attention, numeric.torch_device)
    return run_theirs(reference, fed, construction)


@pytest.mark.parametrize("construction", ["prefill", "incremental"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@every_dtype
def test_transformers_has_our_bits(here, fed, dtype, attention, construction):
    kernels = {"sdpa": versions.matching_kernel(), "eager": "eager/plain"}
    expected = theirs(here, fed, dtype, attention, construction)
    assert differing(ours(here, fed, dtype, kernels.pop(attention), construction), expected) == []
    (other,) = kernels.values()
    assert differing(ours(here, fed, dtype, other, construction), expected), "the control: the other kernel"
    if (attention, construction) == ("sdpa", "prefill"):  # the other releases' kernel has its bits in one call
        assert differing(ours(here, fed, dtype, versions.other_kernel(), construction), expected) == []


@pytest.mark.parametrize("kernels", ["repeat_kv", "packed_gqa", "eager/plain"])
@every_dtype
@slow_on_the_cpu
def test_copies_and_replicas_keep_equal_bits(here, dtype, kernels):
    """A construction whose copies differ raises by itself; a second call on the same tokens has the same bits."""
    model = load_model(here.checkpoint, here.numeric(dtype, kernels))
    live = build_live(model, here.prompt())
    incremental = build_incremental(model, live.state)
    assert equal(live, incremental)
    for boundary in (incremental, build_prefill(model, live.state)):
        replica = boundary.replica()
        assert equal(boundary, replica)
        flip_bit(replica.cache.values(1), (1, 0, 3, 0))
        assert not equal(boundary, replica), "the control: one bit"


@every_dtype
@slow_on_the_cpu
def test_invariant_kernels_hold_or_are_refused_in_one_line(here, dtype):
    numeric = here.numeric(dtype, "invariant")
    try:
        model = load_model(here.checkpoint, numeric)
    except InputError as refusal:
        message = str(refusal)
        assert "\n" not in message and "expected" in message, message
        assert any(name in message for name in (numeric.attention, numeric.linear)), message
        pytest.skip(f"refused on {here.device}: {message}")
    live = build_live(model, here.prompt())
    assert all(equal(live, build(model, live.state)) for build in (build_incremental, build_prefill))
