"""The FP64 oracle: the same prefix in float64, and how far a boundary in another dtype is from it."""

import math
from typing import Any

import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.build import build_prefill
from decode.greedy import best_two
from decode.state import State
from minimodel.checkpoint import Checkpoint
from minimodel.decoder import Decoder
from minimodel.load import decoder_from
from minimodel.numerics import NumericContract
from minimodel.roles import MERGE


class Oracle:
    """Boundaries of one checkpoint in FP64 under the eager kernel, built at first use and kept by prefix."""

    def __init__(self, checkpoint: Checkpoint, device: str, threads: int) -> None:
        self._checkpoint = checkpoint
        self._numeric = NumericContract("fp64", device, attention="eager", threads=threads)
        self._model: Decoder | None = None
        self._kept: dict[tuple[int, ...], Boundary] = {}

    def at(self, state: State) -> Boundary:
        """Returns the FP64 boundary of a prefix, in one copy: no bits are compared with it."""
        if state.tokens not in self._kept:
            if self._model is None:
                self._model = decoder_from(self._checkpoint, self._numeric)
            self._kept[state.tokens] = build_prefill(self._model, state, copies=1)
        return self._kept[state.tokens]


def oracle_entry(built: dict[str, Boundary], oracle: Boundary) -> dict[str, Any]:
    """Returns the row's `oracle`: per arm the relative L2 of cache and logits to the oracle's and whether the argmax is
    equal; `nearer`, the arm whose cache is nearer, None at equal distance; `margin`, the oracle's at the boundary.
    """
    eligible = oracle.state.contract.eligible[MERGE].to(oracle.logits.device)
    token, top, second = best_two(oracle.logits, eligible)
    arms = {}
    for name, boundary in built.items():
        mine = [tensor[:1] for _, _, tensor in boundary.cache.tensors()]
        arms[name] = {
            "cache_relative_l2": _relative_l2(mine, [tensor for _, _, tensor in oracle.cache.tensors()]),
            "logits_relative_l2": _relative_l2([boundary.logits[:1]], [oracle.logits]),
            "argmax_equal": best_two(boundary.logits, eligible)[0] == token,
        }
    distances = {name: entry["cache_relative_l2"] for name, entry in arms.items()}
    nearest = min(distances.values())
    names = [name for name, distance in distances.items() if distance == nearest]
    return {"arms": arms, "nearer": names[0] if len(names) == 1 else None, "margin": top - second}


def _relative_l2(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """Returns delta L2 over the oracle's norm, both in float64."""
    delta = sum(float((a.to(torch.float64) - b).square().sum()) for a, b in zip(mine, theirs, strict=True))
    norm = sum(float(b.square().sum()) for b in theirs)
    return math.sqrt(delta / norm) if norm else 0.0
