"""The rule that names causes and the margin statistics: pure functions of rows."""

import pytest

from experiments.causes.rules import margins, verdict

CELLS = {
    (True, True): "bf16/repeat_kv/plain",
    (True, False): "bf16/repeat_kv/tiled",
    (False, True): "bf16/blocked/plain",
    (False, False): "bf16/blocked/tiled",
}


def row(name: str, exact: bool) -> dict:
    block = {"exact": exact}
    return {"row": name, "comparisons": {"incremental:prefill": {"cache": block, "suffix": block}}}


def crossing(differs) -> dict[str, list[dict]]:
    """Rows a and b under the four cells; `differs(attention default, linear default)` says whether they differ."""
    return {cell: [row("a", not differs(*factors)), row("b", True)] for factors, cell in CELLS.items()}


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


def diverging(name: str, margin: float, at: int, small_at: int) -> dict:
    steps = [1.0] * 20
    steps[small_at], steps[at] = 0.0, margin
    return {
        "row": name,
        "arms": {"incremental": {"margins": [*steps, None]}},
        "comparisons": {
            "incremental:prefill": {
                "suffix": {"exact": False, "first_divergence": at, "tops": [8.0, 8.0]}  # one BF16 ULP is 0.0625 there
            }
        },
    }


def test_margins_count_units_in_the_last_place_and_rank_correlation():
    rows = [
        diverging("a", 0.0, 3, 3),
        diverging("b", 0.0625, 7, 5),
        diverging("c", 0.25, 12, 9),
        diverging("d", 0.5, 15, 14),
    ]
    found = margins(rows, "bf16")
    assert found["diverging_rows"] == 4
    assert found["within_ulps"] == {"0": 0.25, "1": 0.5, "2": 0.5, "4": 0.75}
    assert found["spearman"] == pytest.approx(1.0) and found["spearman_rows"] == 4
    assert found["tied_steps"] == 4 / 80
    backwards = [
        diverging("a", 0.0, 3, 15),
        diverging("b", 0.0, 7, 11),
        diverging("c", 0.0, 12, 4),
        diverging("d", 0.0, 18, 2),
    ]
    assert margins(backwards, "bf16")["spearman"] < 0


def test_no_diverging_row_gives_no_number():
    found = margins([{"row": "a", "comparisons": {}}], "bf16")
    assert found["diverging_rows"] == 0 and found["within_ulps"]["0"] is None and found["spearman"] is None
