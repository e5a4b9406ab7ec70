"""Summary blocks, cross-precision reductions, donor endpoints and the interpretation label."""

import itertools
import json

import pytest

from stats.donors import (
    CHECKPOINT_SENSITIVE,
    CONDITIONAL,
    PROCEDURAL_FAILURE,
    STRONG,
    UNDERPOWERED,
    DonorRow,
    donor_endpoints,
    interpret,
)
from stats.endpoints import compare_labels, difference_of_differences, disagreement, divergence_spread, first_divergence
from stats.intervals import STREAMS, wilson

EXACT = DonorRow("a", "a", "a", "a")
SWITCHED = DonorRow("i", "p", "i", "p")


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0), ([9, 2], [1, 2], 0)],
)
def test_first_divergence(left, right, index):
    assert first_divergence(left, right) == index == first_divergence(right, left)


def test_disagreement_counts_the_unequal_rows():
    block = disagreement([True, False, False, True]).as_dict()
    assert (block["count"], block["n"], block["rate"]) == (2, 4, 0.5)
    assert disagreement([]).as_dict()["wilson_95"] is None


def test_divergence_spread():
    assert divergence_spread([None, 4, 7, None, 88]) == {"n": 3, "median": 7.0, "min": 4.0, "max": 88.0}
    assert divergence_spread([0, 3]) == {"n": 2, "median": 1.5, "min": 0.0, "max": 3.0}
    assert divergence_spread([None]) == {"n": 0, "median": None, "min": None, "max": None}


def test_accuracy_block():
    left = [True] * 9 + [False] * 11 + [True] * 84 + [False] * 96
    right = [False] * 9 + [True] * 11 + [True] * 84 + [False] * 96
    block = compare_labels(left, right, STREAMS["matched_bf16"]).accuracy_dict("live", "prefill")
    assert block["live"] == {"correct": 93, "n": 200} and block["prefill"] == {"correct": 95, "n": 200}
    assert (block["difference_points"], block["left_only"], block["right_only"]) == (1.0, 9, 11)
    assert block["mcnemar_p"] == 0.8238029479980469
    json.dumps(block, allow_nan=False)
    swapped = compare_labels(right, left, STREAMS["matched_bf16"])
    assert (swapped.bootstrap.difference, swapped.left_only, swapped.right_only) == (-1.0, 11, 9)


def test_reduction_block():
    found = compare_labels([True, True, False, True], [False] * 4, STREAMS["cross_suffix"])
    block = found.reduction_dict("bf16", "fp32")
    assert (block["bf16_count"], block["fp32_count"], block["bf16_only"], block["fp32_only"]) == (3, 0, 3, 0)
    assert block["difference_points"] == -75.0 and block["mcnemar_p"] == 0.25 and block["n"] == 4


def test_difference_of_differences():
    bf16 = ([True, False, False, True], [True, True, False, True])
    fp32 = ([True, False, False, True], [True, False, False, False])
    assert difference_of_differences(bf16, fp32, 30).difference == -50.0
    assert difference_of_differences(fp32, bf16, 30).difference == 50.0
    assert difference_of_differences(bf16, bf16, 30).note == "degenerate"


def test_donor_endpoints_of_every_kind_of_row():
    rows = [
        EXACT,
        SWITCHED,
        DonorRow("i", "p", "p", "p"),  # the prefill recipient kept its own trajectory
        DonorRow("i", "p", "i", "x"),  # the incremental recipient took a third one
        DonorRow("a", "a", "x", "a"),
        DonorRow("a", "a", "a", "x"),
    ]
    block = donor_endpoints(rows)
    assert {name: (rate.count, rate.n) for name, rate in block.items()} == {
        "baseline_divergence": (3, 6),
        "incremental_cache_into_prefill_donor_recovery": (2, 3),
        "prefill_cache_into_incremental_donor_recovery": (2, 3),
        "bidirectional_donor_recovery": (1, 3),
        "exact_control_novel_trajectory": (2, 3),
    }


@pytest.mark.parametrize(
    ("rows", "empty"),
    [
        ([], "baseline_divergence"),
        ([EXACT], "bidirectional_donor_recovery"),
        ([SWITCHED], "exact_control_novel_trajectory"),
    ],
)
def test_a_stratum_without_rows_has_no_rate(rows, empty):
    assert donor_endpoints(rows)[empty].as_dict() == {"count": 0, "n": 0, "rate": None, "wilson_95": None}


def label(divergent, exact, recovered, novel):
    """The label from counts of rows."""
    block = {"bidirectional_donor_recovery": (recovered, divergent), "exact_control_novel_trajectory": (novel, exact)}
    return interpret({name: wilson(*counts) for name, counts in block.items()})


@pytest.mark.parametrize(
    ("expected", "counts"),
    [
        (STRONG, [(12, 6, 12, 0), (42, 6, 42, 0)]),
        (CONDITIONAL, [(12, 5, 12, 0), (48, 0, 48, 0)]),
        (CHECKPOINT_SENSITIVE, [(42, 6, 41, 0), (43, 5, 0, 0), (11, 37, 10, 0)]),
        (PROCEDURAL_FAILURE, [(42, 6, 42, 1), (42, 6, 41, 1), (0, 48, 0, 1)]),
        (UNDERPOWERED, [(11, 37, 11, 0), (0, 48, 0, 0), (11, 5, 11, 0)]),
    ],
)
def test_interpretation(expected, counts):
    assert [label(*one) for one in counts] == [expected] * len(counts)


def test_the_papers_replication_is_conditional():
    endpoints = donor_endpoints([SWITCHED] * 43 + [EXACT] * 5)
    assert interpret(endpoints) == CONDITIONAL == "conditional replication with an underpowered control stratum"


def test_interpretation_is_strong_only_where_every_condition_holds():
    for divergent, exact in itertools.product((0, 11, 12, 13), (0, 5, 6, 7)):
        for recovered, novel in itertools.product({0, max(divergent - 1, 0), divergent}, {0, min(exact, 1), exact}):
            complete = divergent >= 12 and exact >= 6 and recovered == divergent and novel == 0
            assert (label(divergent, exact, recovered, novel) == STRONG) == complete
