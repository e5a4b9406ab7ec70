"""A checkpoint of a test's own, which it may change."""

from pathlib import Path

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")
