"""Shared by all quick tests: one tiny checkpoint, its models and the three constructions of one boundary."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings

from cache import Boundary, build_incremental, build_live, build_prefill
from cache.digest import cache_sha256, tensor_sha256
from decode import Contract, State
from minimodel import Decoder, NumericContract, load_model
from minimodel.errors import InputError
from tests import THREADS
from tests.tiny import TASK, write_checkpoint

# a shell without job control starts background jobs with SIGINT ignored, and every command started here inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)

# no deadline: a shared machine may stall any example; derandomised: a failure is there on every run, or on none
settings.register_profile(
    "quick", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def quiet_process():
    """Every test starts under one set of process settings, whatever the one before it did."""
    numeric("bf16").apply()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test, with the kernel's own reason, where no FP32 or FP64 product keeps a row's bits in any place.

    MKL's are such on some CPUs: in FP64 under its conditional numerical reproducibility, in both with three threads.
    """
    try:
        return (yield)
    except InputError as refusal:
        if not re.search(r"expected invariant rows .* torch\.float(32|64) on cpu", str(refusal)):
            raise
        pytest.skip(str(refusal))


def numeric(dtype: str, **options: object) -> NumericContract:
    """Returns a numeric contract of the suite's thread count (see `tests.helpers.THREADS`) unless one is given."""
    return NumericContract(dtype=dtype, **{"threads": THREADS, **options})


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """The adapted tiny checkpoint, BF16."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def directory(tmp_path):
    """The same, written for one test, which may change it."""
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture(scope="session")
def stock_directory(tmp_path_factory):
    """The same weights without role table and contract."""
    return write_checkpoint(tmp_path_factory.mktemp("stock"), stock=True)


@pytest.fixture(scope="session")
def bf16(tiny_directory):
    return load_model(tiny_directory, numeric("bf16"))


@pytest.fixture(scope="session")
def fp32(tiny_directory):
    return load_model(tiny_directory, numeric("fp32"))


@pytest.fixture(scope="session")
def contract(tiny_directory):
    return Contract.load(tiny_directory)


@pytest.fixture(scope="session")
def prompt(contract):
    return State.prompt(contract, TASK["question"], TASK["choices"])


@dataclass(frozen=True)
class Three:
    """One prefix in the three constructions, and the model that made them."""

    model: Decoder
    live: Boundary
    incremental: Boundary
    prefill: Boundary

    def hashes(self) -> list[tuple[str, str]]:
        return [
            (cache_sha256(boundary.cache), tensor_sha256(boundary.logits))
            for boundary in (self.live, self.incremental, self.prefill)
        ]


def build_three(model: Decoder, prompt: State) -> Three:
    live = build_live(model, prompt)
    return Three(model, live, build_incremental(model, live.state), build_prefill(model, live.state))


@pytest.fixture(scope="session", params=["bf16", "fp32"])
def three(request, prompt):
    """Shared by many tests, none of which may write it: its bits are looked at again when all have run."""
    model = request.getfixturevalue(request.param)
    model.numeric.apply()
    built = build_three(model, prompt)
    before = built.hashes()
    yield built
    assert built.hashes() == before, "a test, or the code it ran, wrote into a shared boundary"


@pytest.fixture
def fresh_threads():
    """For tests that change the thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
