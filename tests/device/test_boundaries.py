"""Copies and constructions on one device: equal copies everywhere, and invariance or its refusal in one line."""

import pytest

from cache import build_incremental, build_live, build_prefill
from minimodel.bits import same_bits
from minimodel.errors import InputError
from minimodel.load import load_model
from tests.helpers import flip_bit

DTYPES = ["bf16", "fp16", "fp32"]


@pytest.mark.parametrize("kernels", ["repeat_kv", "packed_gqa", "eager/plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_replicas_keep_equal_bits(here, dtype, kernels):
    """A construction whose copies differ raises by itself; a second call on the same tokens has the same bits."""
    model = load_model(here.checkpoint, here.numeric(dtype, kernels))
    live = build_live(model, here.prompt())
    incremental = build_incremental(model, live.state)
    assert live.cache.equals(incremental.cache) and same_bits(live.logits, incremental.logits)
    for boundary in (incremental, build_prefill(model, live.state)):
        replica = boundary.replica()
        assert boundary.cache.equals(replica.cache) and same_bits(boundary.logits, replica.logits)
        flip_bit(replica.cache.values(1), (1, 0, 3, 0))
        assert not boundary.cache.equals(replica.cache), "the control: one bit"


@pytest.mark.parametrize("dtype", DTYPES)
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
    for other in (build_incremental(model, live.state), build_prefill(model, live.state)):
        assert live.cache.equals(other.cache) and same_bits(live.logits, other.logits)
