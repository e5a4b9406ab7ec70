"""One small matrix, undisturbed, that ranks must write again."""

import pytest

from tests.faults.conftest import write_small

ROWS = 9


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("sharded"), ROWS)


@pytest.fixture(scope="session")
def alone(small):
    """The run directory of a single process."""
    ended = small.run(small.root / "alone")
    assert ended.code == 0, ended.stderr
    return small.root / "alone"
