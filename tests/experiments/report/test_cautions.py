"""The paper's cautions stand where they apply and nowhere else; an interval that is none is called so."""

import pytest

from experiments.report.summaries import MCNEMAR, PANEL, cautions, head_blocks, numeric_text
from experiments.report.values import change
from stats.endpoints import compare_labels

ACCURACY = {"accuracy": {"mcnemar_p": 1.0}}
CONTROL = {
    "endpoints": {"exact_control_novel_trajectory": {"count": 0, "n": 8, "rate": 0.0, "wilson_95": [0.0, 0.324]}}
}


def texts(*summaries):
    return [block.text for block in cautions(summaries)]


def test_each_caution_stands_once_where_it_applies():
    assert texts({"rows": 8}) == []
    assert texts(ACCURACY, {"precisions": {"fp32": ACCURACY}}) == [MCNEMAR]
    assert texts({"panel": {}}) == [PANEL]
    [control] = texts(CONTROL)
    assert all(part in control for part in ("0 of 8 exact rows", "32.4 %", "does not establish a low artifact rate"))


def test_the_page_and_a_runs_own_report_carry_them(reported, page, markdown):
    whole = "".join(page.text)
    assert whole.count(MCNEMAR) >= 2 and whole.count(PANEL) >= 2 and "low artifact rate" in whole
    assert "transplant-bf16: Fewer rows than the design wants: " in whole
    matrix, _, transplant, _ = ((path / "report.md").read_text() for path in reported)
    assert MCNEMAR in markdown and MCNEMAR in matrix and PANEL not in matrix
    assert PANEL in transplant and "low artifact rate" in transplant


@pytest.mark.parametrize(
    ("left", "right", "start"),
    [
        ([True] * 4, [True] * 4, "+0.0 points, no interval: every row has the same difference"),
        ([False] * 4, [True] * 4, "+100.0 points, no interval: every row has the same difference"),
        ([True], [True], "+0.0 points, no interval: fewer than two rows"),
        ([], [], "no rows"),
        ([True, False, True, True], [True] * 4, "+25.0 points, 95 % [+0.0, +"),
    ],
)
def test_an_interval_stands_where_rows_differ_in_their_difference(left, right, start):
    assert change(compare_labels(left, right, 0).accuracy_dict("a", "b")).startswith(start)


def test_a_failed_gate_heads_the_report_and_says_what_the_numbers_are():
    manifest = {"numeric": [], "environment": {}, "checkpoint": {}}
    failed = head_blocks(manifest, {"rows": 3, "passed": False, "failed_rows": ["b"]})[-1]
    assert failed.label == "Failed" and "1 of 3 rows: b" in failed.text and "no result" in failed.text
    assert "passed on every row" in head_blocks(manifest, {"rows": 3, "passed": True, "failed_rows": []})[-1].text
    assert numeric_text([]) == ""
