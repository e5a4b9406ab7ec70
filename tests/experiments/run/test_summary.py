"""Endpoints of one comparison on rows worked out by hand, and when they are no result."""

import pytest

from experiments.report.values import withheld
from experiments.run.summary import no_result, pair_summary, run_summary

DRIFT = {"exact": False, "relative_l2": 0.5, "max_abs": 2.0, "mean_abs": 0.25}


def row(first, tokens_equal, stated_equal, passed=True):
    pair = {
        "cache": {**DRIFT, "exact": first is None},
        "logits": {**DRIFT, "relative_l2": 0.125, "max_abs": 1.0},
        "suffix": {"exact": first is None, "first_divergence": first},
        "merge_equal": first != 7,
        "answer_tokens_equal": tokens_equal,
        "answer_equal": stated_equal,
        "correct_equal": stated_equal,
        "argmax_equal": first != 0,
    }
    arms = {"live": {"correct": True}, "prefill": {"correct": stated_equal}}
    gates = {"replica_live": passed, "argmax": True}
    return {"row": "a", "arms": arms, "comparisons": {"live:prefill": pair}, "gates": gates, "passed": passed}


ROWS = [row(None, True, True), row(0, False, True), row(7, False, False), row(0, False, True)]
FAILED = {"row": "b", "failure": "NaN", "gates": {"replica_live": False, "argmax": False}, "passed": False}


def test_the_endpoints_of_four_rows():
    """An answer is read as tokens and as what it states; logits have their magnitude beside the cache's."""
    summary = pair_summary(ROWS, "live", "prefill")
    assert summary["answer_tokens_disagreement"]["count"] == 3
    assert summary["answer_disagreement"]["count"] == 1 == summary["correctness_disagreement"]["count"]
    assert (summary["suffix_disagreement"]["count"], summary["merge_disagreement"]["count"]) == (3, 1)
    assert summary["argmax_equal_rows"] == 2
    assert (summary["cache"]["exact_rows"], summary["logits"]["exact_rows"]) == (1, 0)
    assert summary["first_token_divergence_rows"] == 2 and summary["first_divergence"]["n"] == 3
    assert pair_summary(ROWS[:1], "live", "prefill")["first_token_divergence_rows"] == 0
    none = pair_summary([{**FAILED, "comparisons": {}}], "live", "prefill")
    assert none == {"comparison": "live:prefill", "compared_rows": 0}, "a row that failed closed"
    assert (summary["cache"]["max_abs_median"], summary["logits"]["max_abs_median"]) == (2.0, 1.0)
    assert (summary["cache"]["relative_l2_median"], summary["logits"]["relative_l2_median"]) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (ROWS, None),
        ([], "no row was decoded"),
        (
            [*ROWS, row(None, True, True, passed=False)],
            "gates failed on 1 of 5 rows (replica_live on 1); endpoints are over 5 rows",
        ),
        (
            [*ROWS, FAILED],
            "gates failed on 1 of 5 rows (replica_live on 1, argmax on 1); endpoints are over 4 rows",
        ),
    ],
)
def test_endpoints_over_a_failed_row_are_no_result(rows, reason):
    assert no_result(rows) == reason
    summary = run_summary("matrix", "bf16", rows, {})
    assert (summary["passed"], summary["no_result"]) == (reason is None, reason)


def test_the_closing_line_of_a_failed_run_holds_no_endpoint():
    failed = {"experiment": "matrix", "dtype": "bf16", "rows": 5, "failed_rows": ["a"], "passed": False}
    line = withheld({**failed, "no_result": "a reason"})
    assert line == "matrix bf16: 5 rows, gates FAILED on 1 rows; endpoints withheld: a reason"
