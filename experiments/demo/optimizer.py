"""Muon for the layers' matrices and AdamW for everything else, their schedule, and a training state without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from minimodel.errors import refuse

MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
WARMUP, DECAY_FROM = 0.01, 0.4  # shares of the run
PRIMARY_AT = 0.9  # share of the run after which the primary checkpoint is taken; the later one is the end


def is_matrix(name: str) -> bool:
    """Whether Muon trains this tensor: the layers' projections, not embeddings, norms or biases."""
    return name.startswith("model.layers.") and name.endswith("proj.weight")


def rate(progress: float) -> float:
    """The learning rate's factor at `progress` in [0, 1].

    A short warm-up, constant to 40 % of the run, linear to 4 % at the primary checkpoint, 4 % from there to the end.
    """
    if progress < WARMUP:
        return progress / WARMUP
    return min(1.0, max(0.04, 1.0 - 0.96 * (progress - DECAY_FROM) / (PRIMARY_AT - DECAY_FROM)))


class Optimizer:
    """Both optimizers over named FP32 parameters."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        matrices = [parameter for name, parameter in parameters.items() if is_matrix(name)]
        self.others = [parameter for name, parameter in parameters.items() if not is_matrix(name)]
        self.muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01)
        self.adamw = torch.optim.AdamW(self.others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """One update at `factor` of the full rates; AdamW's gradients are clipped to norm 1; Muon is scale-free."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, full in ((self.muon, MATRIX_RATE), (self.adamw, OTHER_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = full * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def save_state(
    path: Path, step: int, plan: Mapping[str, str], parameters: Mapping[str, Parameter], optimizer: Optimizer
) -> None:
    """Parameters and both optimizers' moments after `step` steps: one safetensors file, replacing the old one whole."""
    tensors = {f"parameter.{name}": parameter.detach().contiguous() for name, parameter in parameters.items()}
    for kind, part in (("muon", optimizer.muon), ("adamw", optimizer.adamw)):
        for index, moments in part.state_dict()["state"].items():
            tensors |= {f"{kind}.{index}.{key}": value.contiguous() for key, value in moments.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={**plan, "step": str(step)})
    partial.replace(path)


def load_state(path: Path, plan: Mapping[str, str], parameters: Mapping[str, Parameter], optimizer: Optimizer) -> int:
    """Fills parameters and moments in place; returns the number of steps done. InputError for another plan's state."""
    moments: dict[str, dict[int, dict[str, Tensor]]] = {"muon": {}, "adamw": {}}
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        for key, expected in plan.items():
            if metadata.get(key) != expected:
                raise refuse(f"{path}: {key}", f"{expected}, as asked", metadata.get(key))
        for name in list(file.keys()):
            kind, rest = name.split(".", 1)
            if kind == "parameter":
                parameters[rest].data.copy_(file.get_tensor(name))
            else:
                index, key = rest.split(".", 1)
                moments[kind].setdefault(int(index), {})[key] = file.get_tensor(name)
    for kind, part in (("muon", optimizer.muon), ("adamw", optimizer.adamw)):
        part.load_state_dict({**part.state_dict(), "state": moments[kind]})
    return int(metadata["step"])
