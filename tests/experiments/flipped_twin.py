"""The twin with one wrong bit: the last value of the last token, in the last layer, of the second copy."""

from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.benchmark.arms import Arm
from minimodel.load import load_model
from minimodel.numerics import NumericContract
from tests.helpers import flip_bit


class FlippedTwin(Arm):
    def tensors(self, cache: Any) -> list[Tensor]:
        tensors = [tensor.clone() for tensor in super().tensors(cache)]
        flip_bit(tensors[-1], (1, -1, -1, -1))
        return tensors


def open_arm(directory: Path, numeric: NumericContract) -> FlippedTwin:
    return FlippedTwin("flipped twin", load_model(directory, numeric), numeric.attention)
