"""Memory of one arm, measured in a process of its own."""

from pathlib import Path

import torch

from experiments.benchmark.child import Job, in_child
from tests.helpers import refused
from tests.tiny import write_checkpoint


def test_memory_is_of_the_arm_alone(tmp_path: Path) -> None:
    """A larger checkpoint raises the peak by its weights; ballast in this process does not."""
    ballast = torch.ones(1 << 26)  # 256 MB
    large = {"hidden_size": 1024, "intermediate_size": 4096}
    found, sizes = {}, {}
    for name, config in (("small", {}), ("large", large)):
        directory = write_checkpoint(tmp_path / name, config=config)
        sizes[name] = (directory / "model.safetensors").stat().st_size
        job = Job(str(directory), "bf16", "cpu", 1, "repeat_kv", None, 40)
        found[name] = in_child(job)
        assert found[name]["imports"] <= found[name]["loaded"] <= found[name]["peak"] and found[name]["seconds"] > 0
    grown = {name: found[name]["loaded"] - found[name]["imports"] for name in found}
    assert sizes["large"] > 80e6 and ballast[0] == 1
    assert grown["small"] < 60e6 < 0.9 * sizes["large"] < grown["large"] < sizes["large"] + 60e6


def test_a_child_that_fails_is_one_line(tmp_path: Path) -> None:
    with refused("child process", "nowhere"):
        in_child(Job(str(tmp_path / "nowhere"), "bf16", "cpu", 1, "repeat_kv", None, 40))
