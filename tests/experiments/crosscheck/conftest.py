"""One prefix, its genuine boundaries and traces, recorded once."""

import pytest

from cache import build_live
from cache.storage import Provenance
from tests.conftest import numeric
from tests.experiments.crosscheck.recordings import BUILD, record


@pytest.fixture(scope="session")
def state(tiny_directory, bf16, prompt):
    bf16.numeric.apply()
    return build_live(bf16, prompt).state


@pytest.fixture(scope="session")
def provenance(tiny_directory):
    numeric("bf16").apply()
    return Provenance.here(tiny_directory, numeric("bf16"))


@pytest.fixture(scope="session")
def genuine(tmp_path_factory, bf16, state, provenance):
    """Untampered files by construction and kind: "incremental trace", "prefill boundary", ..."""
    folder, files = tmp_path_factory.mktemp("genuine"), {}
    bf16.numeric.apply()
    for construction in BUILD:
        files |= record(folder, bf16, state, state, construction, provenance)
    return files
