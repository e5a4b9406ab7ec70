"""The floor makes the arm's own products and attention, and nothing else."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.kv import KVCache
from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, available, open_ours
from experiments.benchmark.floor import Floor
from experiments.benchmark.workload import Workload
from minimodel.bits import COPIES
from minimodel.checkpoint import open_checkpoint
from tests.conftest import numeric


class Products(TorchDispatchMode):
    """Counts products and attention by name and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear", "_linear_pointwise") or "attention" in name:
            self.seen[name, *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "invariant"])
@pytest.mark.parametrize("length", [1, 20])
def test_floor_makes_exactly_the_arms_products(name: str, length: int, tiny_directory: Path) -> None:
    names, omitted = available((name,), numeric("bf16"), open_checkpoint(tiny_directory).config)
    if omitted:
        pytest.skip(omitted[0])
    [arm] = open_ours(tiny_directory, numeric("bf16"), names)
    work = Workload.of(Contract.load(tiny_directory), 40, torch.device("cpu"))
    tokens, roles, positions, mask = work.call(40)
    with torch.no_grad():
        cache = KVCache.for_model(arm.model, COPIES, 40)
        if length < 40:
            arm.model(*work.call(40 - length), cache)
        part = slice(40 - length, 40)
        with Products() as model:
            hidden = arm.model(tokens[:, part], roles[:, part], positions[:, part], mask[:, :, part], cache)
            arm.model.logits(hidden[:, -1:])
        floor = Floor(arm.model, length, 40, mask[:, :, part])
        with Products() as alone:
            floor()
    # packed, a step takes q, k, v as one product and gate, up as one; a call of more rows takes each alone
    products = 5 if arm.model.numeric.linear == "packed" and length == 1 else 8
    assert sum(model.seen.values()) == products * 3 + 1
    assert alone.seen == model.seen
