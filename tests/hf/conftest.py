"""Checkpoints, our decoder and transformers' model of each, in both precisions."""

from pathlib import Path

import pytest

from minimodel.decoder import Decoder
from minimodel.load import load_model
from minimodel.numerics import DTYPES, NumericContract
from tests import THREADS
from tests.experiments.commands import write_tasks
from tests.hf import versions
from tests.hf.inputs import CONTENT, CONTRACT, WIDE, Request, six_blocks
from tests.hf.reference import Reference
from tests.hf.runs import Run, run_ours, run_theirs
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
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def directory(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small adapted checkpoint whose every parameter is random in the dtype itself."""
    path = tmp_path_factory.mktemp(f"adapted-{dtype}") / "checkpoint"
    return write_checkpoint(path, DTYPES[dtype], config=WIDE, contract=CONTRACT)


@pytest.fixture(scope="session")
def stock(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another without role table and contract."""
    return write_checkpoint(tmp_path_factory.mktemp(f"stock-{dtype}") / "checkpoint", DTYPES[dtype], seed=7, stock=True)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with short blocks and its tasks, for recordings, which go beside them."""
    root = tmp_path_factory.mktemp("record")
    write_checkpoint(root / "checkpoint", seed=3, config=WIDE, contract=SHORT)
    write_tasks(root / "tasks.jsonl", ROWS)
    return root


@pytest.fixture(scope="session")
def asked(directory: Path) -> Request:
    """Two rows over all six blocks."""
    return six_blocks(directory, content=CONTENT)


@pytest.fixture(scope="session")
def ours(directory: Path, dtype: str) -> Decoder:
    return load_model(directory, numeric(dtype))


@pytest.fixture(scope="session")
def theirs(directory: Path, dtype: str) -> Reference:
    return Reference(directory, DTYPES[dtype])


@pytest.fixture(scope="session")
def our_runs(ours: Decoder, asked: Request) -> dict[str, Run]:
    ours.numeric.apply()
    return {name: run_ours(ours, asked, name) for name in CONSTRUCTIONS}


@pytest.fixture(scope="session")
def their_runs(theirs: Reference, asked: Request, dtype: str) -> dict[str, Run]:
    numeric(dtype).apply()
    return {name: run_theirs(theirs, asked, name) for name in CONSTRUCTIONS}
