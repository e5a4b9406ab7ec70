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
    assert (
        "0 of 8 exact rows" in control and "32.4 %" in control and "does not establish a low artifact rate" in control
    )


def test_the_reports_of_runs_carry_them(written, page):
    whole = "".join(page.text)
    assert whole.count(MCNEMAR) >= 2 and whole.count(PANEL) >= 2 and "low artifact rate" in whole
    assert MCNEMAR in written[1]


def test_a_runs_own_report_carries_them(reported):
    reports = {path.name: (path / "report.md").read_text() for path in reported}
    assert MCNEMAR in reports["matrix-bf16"] and PANEL not in reports["matrix-bf16"]
    assert PANEL in reports["transplant-bf16"] and "low artifact rate" in reports["transplant-bf16"]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([True] * 4, [True] * 4, "+0.0 points, no interval: every row has the same difference"),
        ([False] * 4, [True] * 4, "+100.0 points, no interval: every row has the same difference"),
        ([True], [True], "+0.0 points, no interval: fewer than two rows"),
        ([], [], "no rows"),
    ],
)
def test_an_interval_without_a_discordant_row_is_none(left, right, expected):
    assert change(compare_labels(left, right, 0).accuracy_dict("a", "b")) == expected


def test_with_discordant_rows_the_interval_stands():
    shown = change(compare_labels([True, False, True, True], [True, True, True, True], 0).accuracy_dict("a", "b"))
    assert shown.startswith("+25.0 points, 95 % [+0.0, +")


def test_a_failed_gate_heads_the_report_and_says_what_the_numbers_are():
    manifest = {"numeric": [], "environment": {}, "checkpoint": {}}
    failed = head_blocks(manifest, {"rows": 3, "passed": False, "failed_rows": ["b"]})[-1]
    assert failed.label == "Failed" and "1 of 3 rows: b" in failed.text and "no result" in failed.text
    assert "passed on every row" in head_blocks(manifest, {"rows": 3, "passed": True, "failed_rows": []})[-1].text
    assert numeric_text([]) == ""
