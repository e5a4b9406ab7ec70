"""Threads that wait for work give the core away, set before torch loads unless the user has set it."""

import os
import subprocess
import sys

import pytest

from tests.experiments.commands import ROOT

SCRIPT = """
import os, sys
import experiments
assert "torch" not in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "passive None"),
        ({"OMP_WAIT_POLICY": "active"}, "active None"),
        ({"GOMP_SPINCOUNT": "10000"}, "None 10000"),
    ],
)
def test_the_policy_is_passive_unless_the_user_chose(chosen: dict[str, str], expected: str) -> None:
    rest = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env={**rest, **chosen}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
