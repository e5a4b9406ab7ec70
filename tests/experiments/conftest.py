"""One small study for the experiments' tests: its matrix and fixed-prefix runs are made once."""

from pathlib import Path

import pytest

from tests.experiments.runs import write_study


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """primary/, later/, tasks.jsonl, runs/matrix-bf16, runs/fixed_prefix-bf16-fp32. No test may write into it."""
    return write_study(tmp_path_factory.mktemp("study"))
