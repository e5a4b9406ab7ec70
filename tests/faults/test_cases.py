"""Each kind of fault that people met in public has its tests, which name it by its number in their docstring."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
KINDS = {  # and the least number of tests
    1: ("construction changes bits", 2),
    2: ("environment changes bits", 4),
    3: ("ties", 1),
    4: ("masked rows", 3),
    5: ("mask meaning", 2),
    6: ("left padding", 2),
    7: ("grouped heads", 3),
    8: ("RoPE base", 2),
    9: ("window flags", 3),
    10: ("output head", 4),
    11: ("shard index", 2),
    12: ("damaged bytes", 2),
    13: ("typed delimiters", 1),
    14: ("padded vocabulary", 3),
    15: ("cache mutated by use", 1),
    16: ("cache API across versions", 2),
    17: ("NaN", 5),
    18: ("answer letters", 1),
    19: ("numbers", 1),
    20: ("boxes", 2),
    21: ("no discordant pair", 1),
    22: ("Wilson at the ends", 2),
    23: ("constant data", 1),
    24: ("torn ledger", 4),
    25: ("two writers", 1),
    26: ("choices", 2),
}


def cases_of(source):
    """The kinds named by the test functions of a module that can fail: they assert, or expect a refusal."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        able = any(isinstance(part, ast.Assert | ast.With) for part in ast.walk(node))
        if able and node.name.startswith("test_"):
            for numbers in re.findall(r"[Cc]ases? ([\d, ]+)", ast.get_docstring(node) or ""):
                yield from map(int, re.findall(r"\d+", numbers))


@cache
def counts():
    """Tests per kind, from every test module."""
    return Counter(kind for path in TESTS.rglob("test_*.py") for kind in cases_of(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_tests(kind):
    name, least = KINDS[kind]
    assert counts()[kind] >= least, f"case {kind} ({name})"


def test_only_tests_that_can_fail_count():
    assert set(counts()) == set(KINDS) == set(range(1, 27))
    able, unable = (f'def test_x():\n    """Reports (cases 3, 5)."""\n    {line}\n' for line in ("assert y", "y"))
    assert list(cases_of(able)) == [3, 5]
    assert list(cases_of(unable)) == list(cases_of(able.replace("test_x", "x"))) == []
