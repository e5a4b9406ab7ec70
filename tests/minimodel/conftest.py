"""A checkpoint of a test's own, which it may change."""

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path / "tiny")
