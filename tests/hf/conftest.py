"""Checkpoints, our decoder and transformers' model of each, in both precisions."""

import pytest

from minimodel.load import load_model
from minimodel.numerics import DTYPES, NumericContract
from tests import THREADS
from tests.experiments.commands import write_tasks
from tests.hf import versions
from tests.hf.reference import Reference
from tests.hf.runs import CONTENT, CONTRACT, WIDE, run_ours, run_theirs, six_blocks
from tests.tiny import write_checkpoint

CONSTRUCTIONS = ("prefill", "incremental", "chunks")
ROWS = 2
# a random model hardly ever closes a block by itself: the caps set the lengths, and a prefix of 160 tokens is long
# enough for the SDPA kernels to differ in BF16
SHORT = {"caps": {"branch": 24, "merge": 20, "answer": 6}}


def numeric(dtype: str, kernel: str = "", threads: int = THREADS) -> NumericContract:
    """The contract of a comparison with the installed release: its own kernel unless another is named."""
    return NumericContract(dtype, attention=kernel or versions.matching_kernel(), threads=threads)


@pytest.fixture(scope="session", params=["bf16", "fp32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="session")
def directory(dtype, tmp_path_factory):
    """A small adapted checkpoint whose every parameter is random in the dtype itself."""
    path = tmp_path_factory.mktemp(f"adapted-{dtype}") / "checkpoint"
    return write_checkpoint(path, DTYPES[dtype], config=WIDE, contract=CONTRACT)


@pytest.fixture(scope="session")
def stock(dtype, tmp_path_factory):
    """Our decoder and transformers' model of another without role table and contract."""
    path = tmp_path_factory.mktemp(f"stock-{dtype}") / "checkpoint"
    directory = write_checkpoint(path, DTYPES[dtype], seed=7, stock=True)
    return load_model(directory, numeric(dtype)), Reference(directory, DTYPES[dtype])


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """A checkpoint with short blocks and its tasks, for recordings, which go beside them."""
    root = tmp_path_factory.mktemp("record")
    write_checkpoint(root / "checkpoint", seed=3, config=WIDE, contract=SHORT)
    write_tasks(root / "tasks.jsonl", ROWS)
    return root


@pytest.fixture(scope="session")
def fed(directory):
    """Two rows over all six blocks."""
    return six_blocks(directory, content=CONTENT)


@pytest.fixture(scope="session")
def ours(directory, dtype):
    return load_model(directory, numeric(dtype))


@pytest.fixture(scope="session")
def theirs(directory, dtype):
    return Reference(directory, DTYPES[dtype])


@pytest.fixture(scope="session")
def our_runs(ours, fed):
    ours.numeric.apply()
    return {name: run_ours(ours, fed, name) for name in CONSTRUCTIONS}


@pytest.fixture(scope="session")
def their_runs(theirs, fed, dtype):
    numeric(dtype).apply()
    return {name: run_theirs(theirs, fed, name) for name in CONSTRUCTIONS}
