"""Every test that the table of public faults names is there, can fail, and is collected."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.cases import CASES

TESTS = Path(__file__).resolve().parents[1]


@cache
def defined(file: str) -> frozenset[str]:
    """The test functions of a module, read without importing it (transformers' tests are slow to import)."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _asserts(node))


def _asserts(function: ast.FunctionDef) -> bool:
    """A test that can fail: it asserts, or expects a refusal, or calls what does."""
    return function.name.startswith("test_") and any(isinstance(n, ast.Assert | ast.With) for n in ast.walk(function))


def test_the_table_is_whole():
    assert list(CASES) == list(range(1, 27))
    assert len({kind for kind, _ in CASES.values()}) == 26


@pytest.mark.parametrize("number", CASES)
def test_every_kind_has_its_tests(number, request):
    kind, tests = CASES[number]
    assert tests, kind
    collected = {item.nodeid.partition("[")[0] for item in request.session.items}
    modules = {nodeid.partition("::")[0] for nodeid in collected}
    for test in tests:
        file, _, name = test.partition("::")
        assert name in defined(file), f"case {number} ({kind}): no test {test}"
        # in a run of everything pytest itself must have collected it (a run of single tests has no say)
        if f"tests/{file}" in modules and len(request.session.items) > 500:
            assert f"tests/{test}" in collected, f"case {number} ({kind}): {test} is not collected"


def test_the_table_sees_a_test_that_is_not_there():
    assert "test_there_is_no_such_thing" not in defined("cache/test_build.py")
    assert "copies" not in defined("decode/test_greedy.py"), "a helper is no test"
