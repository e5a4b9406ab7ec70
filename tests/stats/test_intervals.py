"""Wilson, McNemar and the paired bootstrap against the paper's digits, scipy, and their edge cases."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

import stats.intervals
from stats.errors import StatsInputError
from stats.intervals import SEED, STREAMS, Z_MATRIX, Z_TRANSPLANT, mcnemar_exact, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [(166, 200, 77.18, 87.57), (49, 200, 19.06, 30.90), (20, 200, 6.57, 14.94), (0, 200, 0.0, 1.88)],
)
def test_wilson_gives_the_papers_percentages(count, n, low, high):
    interval = wilson(count, n)
    assert (round(100 * interval.low, 2), round(100 * interval.high, 2)) == (low, high)


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [
        (0, 1, 0.0, 0.7934506856227626),
        (0, 50, 0.0, 0.07134759913335872),
        (38, 38, 0.908190131774416, 1.0),
        (7, 20, 0.1811918241010821, 0.5671457233147637),
    ],
)
def test_wilson_at_the_ends(count, n, low, high):
    """Case 22."""
    interval = wilson(count, n, Z_TRANSPLANT)
    assert interval.low == pytest.approx(low, rel=4e-16, abs=0) and interval.high == pytest.approx(high, rel=4e-16)
    if count in (0, n):
        assert (interval.low if count == 0 else interval.high) == (0.0 if count == 0 else 1.0)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys_interval(pair):
    count, n = pair
    ours, scipys = wilson(count, n, Z_TRANSPLANT), binomtest(count, n).proportion_ci(0.95, method="wilson")
    assert ours.low == pytest.approx(scipys.low, abs=1e-14) and ours.high == pytest.approx(scipys.high, abs=1e-14)
    assert 0.0 <= ours.low <= ours.rate <= ours.high <= 1.0
    assert wilson(count, n, Z_MATRIX).high != ours.high or count == n


def test_wilson_without_data_and_with_impossible_counts():
    """Case 22."""
    assert wilson(0, 0).as_dict() == {"count": 0, "n": 0, "rate": None, "wilson_95": None}
    for count, n in ((2, 1), (-1, 3), (0, -1)):
        with pytest.raises(StatsInputError, match=f"found count {count}, n {n}"):
            wilson(count, n)
    assert wilson(1, 2).as_dict()["rate"] == 0.5


@pytest.mark.parametrize(
    ("left", "right", "p"),
    [
        *[(9, 11, 0.8238029479980469), (166, 0, 2.1382117680737565e-50), (0, 49, 3.552713678800501e-15)],
        *[(20, 0, 1.9073486328125e-06), (0, 0, 1.0), (0, 6, 0.03125), (3, 8, 0.2265625), (1, 1, 1.0)],
    ],
)
def test_mcnemar(left, right, p):
    """Without a discordant pair p is 1: evaluate 795 (case 21)."""
    assert mcnemar_exact(left, right) == p == mcnemar_exact(right, left)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_twice_the_smaller_tail(left, right):
    n, tail = left + right, sum(math.comb(left + right, i) for i in range(min(left, right) + 1))
    assert mcnemar_exact(left, right) == pytest.approx(min(1.0, 2 * tail / 2**n), rel=1e-9)


def test_bootstrap_depends_on_seed_stream_and_order_only():
    differences, before = list(np.random.default_rng(1).normal(size=40)), np.random.get_state()[1].copy()
    first = paired_bootstrap(differences, SEED, 3)
    assert first == paired_bootstrap(np.array(differences), SEED, 3)
    assert first == paired_bootstrap(differences, SEED + 3, 0)
    others = [paired_bootstrap(differences, SEED, 4), paired_bootstrap(differences[::-1][1:], SEED, 3)]
    assert all(other.interval != first.interval for other in others)
    assert first.interval[0] < first.difference < first.interval[1]
    assert first.difference == pytest.approx(100 * sum(differences) / 40)
    assert (np.random.get_state()[1] == before).all(), "numpy's global generator was used"


@pytest.mark.parametrize("n", [2, 3, 7, 200])
def test_bootstrap_draws_blocks_of_1000_rows_however_many_at_once(n, monkeypatch):
    differences, generator = np.random.default_rng(n).integers(-1, 2, n), np.random.default_rng(SEED + 5)
    blocks = [differences[generator.integers(0, n, (1_000, n))].mean(axis=1) for _ in range(20)]
    expected = [float(q) for q in np.percentile(np.concatenate(blocks) * 100.0, [2.5, 97.5])]
    assert paired_bootstrap(differences, SEED, 5).interval == expected
    monkeypatch.setattr(stats.intervals, "_DRAWS_AT_ONCE", 37 * n)
    assert paired_bootstrap(differences, SEED, 5).interval == expected


def test_bootstrap_of_constant_and_of_little_data():
    """Case 23."""
    constant = paired_bootstrap([0.01] * 10, SEED, 0)
    assert constant.note == "degenerate" and constant.interval == pytest.approx([1.0, 1.0])
    assert paired_bootstrap([1] * 10, SEED, 0).interval == [100.0, 100.0]
    single, none = paired_bootstrap([1], SEED, 0), paired_bootstrap([], SEED, 0)
    assert single.as_dict() == {"difference_points": 100.0, "bootstrap_95": None, "bootstrap_note": "too few"}
    assert none.as_dict() == {"difference_points": None, "bootstrap_95": None, "bootstrap_note": "too few"}
    for result in (constant, single, none):
        json.dumps(result.as_dict(), allow_nan=False)
    assert paired_bootstrap([0, 1, 1], SEED, 0).note is None


def test_streams_are_distinct():
    assert len(set(STREAMS.values())) == len(STREAMS) == 9
