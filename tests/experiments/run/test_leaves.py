"""Nested JSON taken apart and compared: every leaf, its exact value and its type."""

import pytest

from experiments.run.ledger import compare_leaves, leaves


def test_a_list_of_plain_values_and_an_empty_object_are_one_leaf():
    value = {"a": [{"b": 1}, {"b": [1, 2]}], "c": None, "d": {}, "e": []}
    assert leaves(value) == {"a[0].b": 1, "a[1].b": [1, 2], "c": None, "d": {}, "e": []}


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True), (0.0, -0.0), (0.1 + 0.2, 0.3), ("1", 1), ([], {})])
def test_types_and_last_bits_are_told_apart(left, right):
    assert compare_leaves({"x": left}, {"x": left}).equal
    (found,) = compare_leaves({"x": left}, {"x": right}).differing
    assert found.path == "x"


def test_every_difference_is_one_line_with_both_values():
    found = compare_leaves({"a": {"b": 1, "c": 2}, "e": 5}, {"a": {"b": 1, "c": 3}, "d": 4})
    assert found.shared == 2 and len(found.differing) == 1 and len(found.one_sided) == 2
    assert found.lines("expected", "found") == [
        "a.c: expected 2, found 3",
        "e: expected 5, found nothing",
        "d: expected nothing, found 4",
    ]


def test_a_longer_list_is_told_from_a_list_of_its_first_entries():
    trial, whole = [f"demo-{i:03}" for i in range(4)], [f"demo-{i:03}" for i in range(200)]
    assert compare_leaves(whole, trial, "row_order").lines("expected", "found") == [
        "row_order: expected 200 entries, found 4"
    ]
    (line,) = compare_leaves(trial, [*trial[:3], "demo-007"], "row_order").lines("expected", "found")
    assert line == 'row_order: expected 4 entries, found 4; entry 3: expected "demo-003", found "demo-007"'
