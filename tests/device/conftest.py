"""The device under test, and the inputs of its size: the demo on CUDA, the tiny checkpoint on the CPU.

On a machine with a GPU `python -m pytest tests/device` takes a few minutes and needs no option. The same tests on the
CPU hold the helpers to what they do where no GPU is.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from decode.contract import Contract
from decode.state import State
from experiments.run.options import DEMO
from experiments.run.tasks import load_tasks
from minimodel.numerics import NumericContract
from tests import THREADS
from tests.experiments.commands import write_tasks
from tests.experiments.runs import CAPS, CONFIG, SEED
from tests.tiny import write_checkpoint

NO_GPU = "no CUDA device is present (torch.cuda.is_available() is false)"


@dataclass(frozen=True)
class UnderTest:
    """A device and what is run on it."""

    device: str  # as --device takes it
    checkpoint: Path  # an adapted checkpoint directory
    tasks: Path  # a tasks file
    rows: int  # decoded by the matrix and what follows it
    content: tuple[int, ...]  # tokens of each block in the parity requests

    def numeric(self, dtype: str, kernels: str) -> NumericContract:
        """Returns the numeric contract of the suite's thread count on this device."""
        return NumericContract(dtype, self.device, kernels, threads=THREADS)

    def prompt(self) -> State:
        """The prompt of the first task."""
        task = load_tasks(self.tasks, 1)[0][0]
        return State.prompt(Contract.load(self.checkpoint), task.question, task.choices)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def here(request, tmp_path_factory):
    """The device under test; CUDA is skipped with its reason where there is none."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip(NO_GPU)
        return UnderTest("cuda", DEMO / "primary", DEMO / "tasks.jsonl", 8, (60, 30, 25, 28, 30, 8))
    root = tmp_path_factory.mktemp("device")
    checkpoint = write_checkpoint(root / "tiny", seed=SEED, config=CONFIG, contract={"caps": CAPS})
    return UnderTest("cpu", checkpoint, write_tasks(root / "tasks.jsonl", 2), 2, (9, 6, 7, 5, 8, 4))
