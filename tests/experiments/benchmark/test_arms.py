"""Arms: columns, the tokens that all of them get, the floor under them, and memory in a fresh process."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cache.kv import KVCache
from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, Floor, Ours, Workload, available, open_ours
from experiments.benchmark.child import Job, in_child
from experiments.benchmark.options import Lengths
from minimodel.bits import COPIES
from minimodel.checkpoint import open_checkpoint
from minimodel.decoder import Decoder
from minimodel.roles import NUM_ROLES
from tests.conftest import numeric
from tests.helpers import refused
from tests.tiny import write_checkpoint


def test_columns_share_weights_and_differ_in_kernels(tiny_directory: Path) -> None:
    names, omitted = available(tuple(COLUMNS), numeric("bf16"), open_checkpoint(tiny_directory).config)
    assert len(names) + len(omitted) == len(COLUMNS)
    arms: list[Ours] = open_ours(tiny_directory, numeric("bf16"), names)
    models: dict[str, Decoder] = {arm.name: arm.model for arm in arms}
    for name, model in models.items():
        assert (model.numeric.attention, model.numeric.linear) == COLUMNS[name]
    assert models["repeat_kv"].embed_tokens is models["packed_gqa"].embed_tokens
    assert models["repeat_kv"].attend is not models["packed_gqa"].attend


def test_workload_has_every_kind_of_block_and_only_ordinary_tokens(contract: Contract) -> None:
    work = Workload.of(contract, 50, torch.device("cpu"))
    assert all(contract.is_ordinary(token) for token in work.tokens) and set(work.roles) == set(range(NUM_ROLES - 1))
    assert list(work.roles) == sorted(work.roles) and work.tokens == Workload.of(contract, 50, work.device).tokens
    assert work.call(50)[3][0, 0, -1].all(), "the last token sees every key"


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
    _, omitted = available(("repeat_kv", name), numeric("bf16"), open_checkpoint(tiny_directory).config)
    if omitted:
        pytest.skip(omitted[0])
    [arm] = open_ours(tiny_directory, numeric("bf16"), (name,))
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


def test_defaults_are_cut_to_the_context() -> None:
    lengths = Lengths(limit=2048, least=25)
    assert lengths.several("--context", None, (128, 512, 2048, 4096)) == (128, 512, 2048)
    assert lengths.one("--length", None, 8192) == 2048 and lengths.one("--prefix", None, 2000) == 2000
    assert lengths.omitted == [
        "--context 4096: beyond max_position_embeddings 2048",
        "--length 8192: cut to max_position_embeddings 2048",
    ]
    with refused("--length", "8192"):
        lengths.one("--length", 8192, 8192)
