"""The crossing's own measurements on the tiny checkpoint: the flipped bit, the chunk curve, the cells."""

import experiments.causes as causes
from cache.drift import CacheDrift, compare
from minimodel.numerics import KERNELS


def test_a_flipped_bit_is_caught_at_its_place(three):
    assert causes.flip_is_caught(three.prefill)


def test_a_comparison_that_misses_the_flip_fails_the_control(three, monkeypatch):
    """The control's own control: a comparison that sees no difference is not let through."""

    def blind(left, right) -> CacheDrift:
        return compare(left, left)

    monkeypatch.setattr(causes, "compare", blind)
    assert not causes.flip_is_caught(three.prefill)


def test_chunks_of_one_are_incremental_and_one_call_is_prefill(three):
    curve = causes.chunk_curve(three.model, three.incremental, three.live.state)
    assert curve["1"]["exact"] and curve["1"]["share"] == 0
    one_call, whole = curve["one_call"], compare(three.incremental.cache, three.prefill.cache).as_dict()
    assert not one_call["exact"]
    assert one_call["share"] == whole["differing"] / whole["elements"]
    assert one_call["relative_l2"] == whole["relative_l2"]


def test_each_dtype_has_the_four_factor_cells_and_one_is_invariant():
    found = causes.cells(["bf16", "fp32"])
    for dtype in ("bf16", "fp32"):
        mine = [cell for cell in found if cell.dtype == dtype]
        assert [(cell.attention, cell.linear) for cell in mine[:4]] == causes.FACTORS
        assert [(c.attention, c.linear) for c in mine if c.invariant] == [KERNELS["invariant"]]
    assert len({cell.name for cell in found}) == len(found)
