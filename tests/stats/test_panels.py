"""The selection rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stats.errors import StatsInputError
from stats.panels import length_spread, spread_positions, stratified_spread

sizes = st.integers(0, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(sizes)
def test_positions_are_distinct_sorted_and_reach_both_ends(size):
    n, k = size
    positions = spread_positions(n, k)
    assert len(positions) == k and positions == sorted(set(positions)) and set(positions) <= set(range(n))
    if k > 1:
        assert positions[0] == 0 and positions[-1] == n - 1
        assert all(abs(p * (k - 1) - i * (n - 1)) * 2 <= k - 1 for i, p in enumerate(positions))


def test_positions_by_hand():
    assert spread_positions(200, 12) == [0, 18, 36, 54, 72, 90, 109, 127, 145, 163, 181, 199]
    assert spread_positions(6, 3) == [0, 2, 5]  # 2.5 goes to the even position
    assert spread_positions(8, 3) == [0, 4, 7]  # and so does 3.5
    assert spread_positions(5, 1) == [2] and spread_positions(5, 5) == [0, 1, 2, 3, 4] and spread_positions(0, 0) == []
    for n, k in ((3, 4), (0, 1), (3, -1)):
        with pytest.raises(StatsInputError, match=f"found {k}"):
            spread_positions(n, k)


@given(st.permutations([(10 * (i // 3), f"r{i:02d}") for i in range(20)]), st.integers(0, 20))
def test_selection_does_not_depend_on_input_order(items, k):
    chosen = [items[i] for i in length_spread(items, k)]
    assert chosen == [sorted(items)[p] for p in spread_positions(20, k)]


def test_equal_lengths_are_ordered_by_id():
    assert length_spread([(5, "c"), (5, "a"), (5, "b")], 3) == [1, 2, 0]


def test_strata_are_spread_each_and_a_short_one_gives_all():
    items = [(length, f"r{length}") for length in (9, 1, 5, 3, 7, 2)]
    strata = ["divergent", "divergent", "exact", "divergent", "divergent", "exact"]
    chosen = stratified_spread(items, strata, {"divergent": 2, "exact": 8})
    assert [items[i][0] for i in chosen] == [1, 9, 2, 5]
    assert stratified_spread(items, strata, {"absent": 3}) == []
