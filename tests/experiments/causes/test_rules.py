"""The rule that names causes and the margin statistics: pure functions of rows."""

import pytest

from experiments.causes.rules import FACTORS, margins, verdict

DEFAULTS = [(True, True), (True, False), (False, True), (False, False)]  # attention, linear, of each of FACTORS


def row(name, exact):
    block = {"exact": exact}
    return {"row": name, "comparisons": {"incremental:prefill": {"cache": block, "suffix": block}}}


def crossing(differs):
    """Rows a and b under the four cells; `differs(attention default, linear default)`: whether a differs."""
    return {f"bf16/{c}": [row("a", not differs(*one)), row("b", True)] for c, one in zip(FACTORS, DEFAULTS)}


@pytest.mark.parametrize(
    ("differs", "attention", "linear"),
    [
        (lambda a, x: a, (True, True), (False, False)),  # attention alone
        (lambda a, x: x, (False, False), (True, True)),  # linear alone
        (lambda a, x: a or x, (True, False), (True, False)),  # either suffices, neither is needed
        (lambda a, x: a and x, (False, True), (False, True)),  # only together: each is needed, none suffices
        (lambda a, x: False, (False, False), (False, False)),  # nothing differs: nothing is needed
    ],
)
def test_sufficient_and_necessary_follow_the_four_cells(differs, attention, linear):
    found = verdict("bf16", crossing(differs))["cache"]
    assert (found["attention"]["sufficient"], found["attention"]["necessary"]) == attention
    assert (found["linear"]["sufficient"], found["linear"]["necessary"]) == linear
    assert found["invariant_differs"] == 0
    assert found["default_differs"] == int(differs(True, True))


def test_the_evidence_is_the_rows_of_the_deciding_cell():
    found = verdict("bf16", crossing(lambda a, x: a))["suffix"]["attention"]
    assert found["differs_alone"] == ["a"] and found["differs_without"] == []


def diverging(margin, at, small_at):
    """A row that diverges at step `at`; one BF16 ULP is 0.0625 there."""
    steps = [1.0] * 20
    steps[small_at], steps[at] = 0.0, margin
    suffix = {"exact": False, "first_divergence": at, "tops": [8.0, 8.0]}
    arms = {"incremental": {"margins": [*steps, None]}}
    return {"row": "a", "arms": arms, "comparisons": {"incremental:prefill": {"suffix": suffix}}}


def test_margins_count_units_in_the_last_place_and_rank_correlation():
    places = [(0.0, 3, 3), (0.0625, 7, 5), (0.25, 12, 9), (0.5, 15, 14)]
    found = margins([diverging(*place) for place in places], "bf16")
    assert found["diverging_rows"] == 4
    assert found["within_ulps"] == {"0": 0.25, "1": 0.5, "2": 0.5, "4": 0.75}
    assert found["spearman"] == pytest.approx(1.0) and found["spearman_rows"] == 4
    assert found["tied_steps"] == 4 / 80
    backwards = [(0.0, 3, 15), (0.0, 7, 11), (0.0, 12, 4), (0.0, 18, 2)]
    assert margins([diverging(*place) for place in backwards], "bf16")["spearman"] < 0


def test_no_diverging_row_gives_no_number():
    found = margins([{"row": "a", "comparisons": {}}], "bf16")
    assert found["diverging_rows"] == 0 and found["within_ulps"]["0"] is None and found["spearman"] is None
