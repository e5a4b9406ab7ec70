"""Fixtures of the statistics tests: the published release where it is present, and a small one made here."""

from pathlib import Path

import pytest

from tests.stats.synthetic import write_release

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"


@pytest.fixture(scope="session")
def published():
    """The paper's released ledgers, in a folder beside the repository."""
    if not (PUBLISHED / "paper_claims.json").is_file():
        pytest.skip(f"the published release is not at {PUBLISHED}")
    return PUBLISHED


@pytest.fixture
def release(tmp_path):
    """A small release in the published format, with other numbers."""
    return write_release(tmp_path / "release")
