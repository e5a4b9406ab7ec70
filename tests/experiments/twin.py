"""A reference for the benchmark's tests: our own decoder under another name, loaded a second time, every part real."""

from pathlib import Path

from experiments.benchmark.arms import Arm
from minimodel.load import load_model
from minimodel.numerics import NumericContract


def open_arm(directory: Path, numeric: NumericContract) -> Arm:
    return Arm("twin", load_model(directory, numeric), numeric.attention)
