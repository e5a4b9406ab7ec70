"""Margins at the first divergence against the drift of the boundary logits: counted from the rows themselves."""

import copy
from dataclasses import replace

import pytest

from experiments.report.figures import why_blocks
from experiments.report.runs import ArmPair, pairs, read_runs
from experiments.run.ledger import row_key


@pytest.fixture
def pair(reported):
    [run] = read_runs([reported[0]])
    return next(pairs(run))


def test_the_counts_and_the_table_are_the_rows_own(pair):
    counts, figure = why_blocks("w", pair)
    found = [one for one in pair.rows if one.first is not None]
    assert len(figure.data.rows) == len(found) == pair.summary["suffix_disagreement"]["count"] > 0
    within = sum(one.margin <= one.drift for one in found)
    assert within and counts.rows[0][1] == f"{within} of {len(found)} rows"
    for one, line in zip(found, figure.data.rows):
        first = one.entry["suffix"]["first_divergence"]
        margins = [one.row["arms"][arm]["margins"][first] for arm in pair.arms]
        assert line[:4] == [row_key(one.row), str(first), *(f"{margin:.3g}" for margin in margins)]
    assert "<svg" in figure.svg


def test_a_margin_larger_than_the_drift_is_counted_as_such(pair):
    rows = copy.deepcopy(pair.rows)
    for one in rows:
        for arm in pair.arms if one.first is not None else ():
            one.row["arms"][arm]["margins"][one.first] = 1e6
    assert why_blocks("w", replace(pair, rows=rows))[0].rows[0][1].startswith("0 of ")


def test_equal_suffixes_have_no_answer_to_why(pair):
    equal = [one for one in pair.rows if one.first is None]
    assert equal and why_blocks("w", replace(pair, rows=equal)) == []


def test_choices_as_close_before_the_divergence_are_counted(pair):
    row = copy.deepcopy(next(one.row for one in pair.rows if one.first is not None))
    live, prefill = (row["arms"][arm] for arm in pair.arms)
    prefill["suffix"] = [*live["suffix"][:3], -1]
    one = ArmPair(row, pair.arms, pair.dtype)
    live["margins"] = [one.drift * 2] * len(live["margins"])
    assert one.first == 3 and one.before == 0
    live["margins"][:5] = [one.drift, None, 0.0, 0.0, 0.0]
    assert one.before == 2
