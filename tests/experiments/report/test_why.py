"""Margins at the first divergence against the drift of the boundary logits: counted from the rows themselves."""

import copy

from experiments.report.runs import Pair, pairs, read_runs
from experiments.report.why import divergence, why_blocks


def pair_of(path):
    [run] = read_runs([path])
    return next(pairs(run))


def test_the_statement_and_the_table_are_the_rows_own(reported):
    pair = pair_of(reported[0])
    statement, figure = why_blocks("w", pair)
    table = figure.data
    found = [one for key, row in pair.rows if (one := divergence(row, key, pair.name, pair.dtype)) is not None]
    assert len(table.rows) == len(found) == pair.summary["suffix_disagreement"]["count"] > 0
    within = sum(one.margin <= one.max_drift for one in found)
    assert statement.rows[0][1] == f"{within} of {len(found)} rows"
    for (key, row), line in zip([(k, r) for k, r in pair.rows if k in {o.row for o in found}], table.rows):
        first = row["comparisons"][pair.name]["suffix"]["first_divergence"]
        margins = [row["arms"][arm]["margins"][first] for arm in pair.arms]
        assert line[:4] == (key, str(first), *(f"{margin:.3g}" for margin in margins))
    assert "<svg" in figure.svg


def test_a_margin_larger_than_the_drift_is_counted_as_such(reported):
    pair = pair_of(reported[0])
    rows = copy.deepcopy(pair.rows)
    for _, row in rows:
        first = row["comparisons"][pair.name]["suffix"]["first_divergence"]
        if first is not None:
            for arm in pair.arms:
                row["arms"][arm]["margins"][first] = 1e6
    counts = [why_blocks("w", Pair(pair.run, pair.dtype, pair.summary, r))[0].rows[0][1] for r in (rows, pair.rows)]
    assert counts[0].startswith("0 of ") and not counts[1].startswith("0 of ")


def test_equal_suffixes_have_no_answer_to_why(reported):
    pair = pair_of(reported[0])
    equal = [(k, r) for k, r in pair.rows if r["comparisons"][pair.name]["suffix"]["exact"]]
    assert equal and why_blocks("w", Pair(pair.run, pair.dtype, pair.summary, equal)) == []


def test_choices_as_close_before_the_divergence_are_counted(reported):
    pair = pair_of(reported[0])
    key, row = next((k, r) for k, r in pair.rows if not r["comparisons"][pair.name]["suffix"]["exact"])
    row, drift = copy.deepcopy(row), row["comparisons"][pair.name]["logits"]["max_abs"]
    margins = row["arms"]["live"]["margins"] = [drift * 2] * len(row["arms"]["live"]["margins"])
    row["comparisons"][pair.name]["suffix"]["first_divergence"] = 3
    assert divergence(row, key, pair.name, pair.dtype).before == 0
    margins[:5] = [drift, None, 0.0, 0.0, 0.0]
    assert divergence(row, key, pair.name, pair.dtype).before == 2
