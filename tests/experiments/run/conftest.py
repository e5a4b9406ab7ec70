"""One small matrix, undisturbed, that ranks must write again."""

from pathlib import Path

import pytest

from tests.faults.conftest import Small, write_small

ROWS = 9


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return write_small(tmp_path_factory.mktemp("sharded"), ROWS)


@pytest.fixture(scope="session")
def alone(small: Small) -> Path:
    """The run directory of a single process."""
    ended = small.run(small.root / "alone")
    assert ended.code == 0, ended.stderr
    return small.root / "alone"
