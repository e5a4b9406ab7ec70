"""What is measured: one arm per column, the tokens that every arm is given, and the floor of our arms."""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.kv import KVCache
from decode.contract import Contract
from decode.greedy import alone
from decode.state import State
from experiments.run.designs import RetainedLive
from experiments.run.inputs import left_out
from experiments.run.progress import Progress
from experiments.run.records import Row
from experiments.run.tasks import Task
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import COPIES
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError, refuse
from minimodel.load import load_model
from minimodel.numerics import NumericContract
from minimodel.roles import MERGE, attention_mask

COLUMNS = {  # name: attention kernel, linear kernel; the first is the default of every command
    "repeat_kv": ("repeat_kv", "plain"),
    "packed_gqa": ("packed_gqa", "plain"),
    "repeat_kv+packed": ("repeat_kv", "packed"),
    "packed_gqa+packed": ("packed_gqa", "packed"),
    "invariant": ("blocked", "tiled"),
}
FLOORED = ("repeat_kv", "packed_gqa")  # kernels that call SDPA once per layer
SEED = 20260728  # of the workload's tokens


class Arm:
    """One column: our decoder under one pair of kernels. A reference overrides the methods in which it differs.

    model: called as `minimodel.decoder.Decoder` by a `decode.stepper.Stepper`; has its `logits`, `config`, `rules` and
    `numeric`. kernel: our attention kernel that has this arm's bits under linear `plain`.
    """

    def __init__(self, name: str, model: Any, kernel: str) -> None:
        self.name, self.model, self.kernel = name, model, kernel

    def new_cache(self, capacity: int, copies: int = COPIES) -> Any:
        """Returns an empty cache with `len`, the tokens it holds, and `copy(capacity)`, which shares no storage."""
        return KVCache.for_model(self.model, copies, capacity)

    def tensors(self, cache: Any) -> list[Tensor]:
        """Returns keys then values [B, H_kv, n, D] of every layer, in forward order."""
        return [tensor for _, _, tensor in cache.tensors()]

    def row(self, task: Task, prompt: State) -> Row:
        """Returns the ledger row of the retained-live matrix."""
        progress = Progress(1, 0, quiet=True).row(task.id)
        return alone(RetainedLive(self.model, [task], [prompt]).row(0, progress))


def open_ours(directory: Path, numeric: NumericContract, names: tuple[str, ...], copies: int = COPIES) -> list[Arm]:
    """Returns one arm per column, in order. Columns that differ only in attention share one set of weights."""
    loaded: dict[str, Decoder] = {}
    arms = []
    for name in names:
        contract = replace(numeric, kernels="/".join(COLUMNS[name]))
        if contract.linear not in loaded:
            loaded[contract.linear] = load_model(directory, contract, copies)
        model = copy.copy(loaded[contract.linear])
        model.numeric, model.attend = contract, ATTENTION_KERNELS[contract.attention]
        arms.append(Arm(name, model, contract.attention))
    return arms


def open_reference(module: str, directory: Path, numeric: NumericContract) -> Arm:
    """Returns `open_arm(directory, numeric)` of the named module: another implementation, loaded as its users load it.
    InputError where the module cannot be imported or has no `open_arm`."""
    try:
        found = importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as error:  # the last two: empty, or relative
        raise InputError(f"--reference {module}: expected a module that can be imported, found {error}") from None
    opener: Callable[[Path, NumericContract], Arm] | None = getattr(found, "open_arm", None)
    if opener is None:
        raise refuse(f"--reference {module}", "a module with open_arm(directory, numeric)", "none in it")
    return opener(directory, numeric)


def available(
    names: tuple[str, ...], numeric: NumericContract, config: ModelConfig
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the columns that this machine can run, and one sentence per column that it cannot."""
    contracts = {name: replace(numeric, kernels="/".join(COLUMNS[name])) for name in names}
    without = left_out(contracts, config, "experiments.benchmark")
    omitted = [f"column {name}: {reason}" for name, reason in without.items()]
    return tuple(name for name in names if name not in without), omitted


@dataclass(frozen=True)
class Workload:
    """Tokens of one request with their roles."""

    contract: Contract
    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, contract: Contract, length: int, device: torch.device) -> "Workload":
        """Returns `length` random ordinary tokens: a fifth prompt, a fifth per branch, the rest merge. So the last
        tokens attend to every key. Blocks scale with the length: a shorter workload is not a prefix of a longer one."""
        ordinary = contract.ordinary.nonzero().flatten()
        chosen = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(SEED))
        roles = tuple(min(5 * slot // length, MERGE) for slot in range(length))
        return cls(contract, tuple(ordinary[chosen].tolist()), roles, device)

    def __len__(self) -> int:
        return len(self.tokens)

    def steps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields (token, role) of slots start to stop-1."""
        return zip(self.tokens[start:stop], self.roles[start:stop])

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        roles = torch.tensor(self.roles, device=self.device)[None]
        mask = attention_mask(roles, roles, visibility=self.contract.rules.visibility)
        tokens = torch.tensor(self.tokens, device=self.device).expand(COPIES, -1)
        positions = torch.arange(len(self), device=self.device).expand(COPIES, -1)
        return tokens, roles.expand(COPIES, -1), positions, mask.expand(COPIES, -1, -1, -1)

    def call(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns input_ids, roles, position_ids [B, T] and mask [B, 1, T, T] of the first `length` tokens."""
        tokens, roles, positions, mask = self._tensors
        return tokens[:, :length], roles[:, :length], positions[:, :length], mask[:, :, :length, :length]


def floor(model: Decoder, mask: Tensor) -> Callable[[], None]:
    """Returns a function that runs the linear and SDPA calls of one forward call and of its last logits, back to back.

    mask: bool [B, 1, T, S] of the call. The linear calls are the model's own, the inputs fixed random numbers, and K/V
    is laid out as in the model's cache.
    """
    config, numeric, (length, key_length) = model.config, model.numeric, mask.shape[2:]
    assert numeric.attention in FLOORED, "only a kernel of one SDPA call per layer has a floor"
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(COPIES, *shape, generator=generator).to(numeric.torch_dtype).to(numeric.torch_device)

    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, product = random(length, config.hidden_size), random(length, config.intermediate_size)
    attended, query = random(length, heads * size), random(length, heads, size).transpose(1, 2)
    if numeric.attention == "packed_gqa" and length == 1:
        query = query.reshape(COPIES, kv_heads, heads // kv_heads, size)
    cache = KVCache.for_model(model, COPIES, key_length)
    for layer in range(config.num_hidden_layers):
        cache.append(layer, random(kv_heads, key_length, size), random(kv_heads, key_length, size))
    repeated = {"scale": size**-0.5, "enable_gqa": query.shape[1] != kv_heads}

    def run() -> None:
        for index, layer in enumerate(model.layers):
            layer.qkv_proj(hidden)
            F.scaled_dot_product_attention(query, cache.keys(index), cache.values(index), mask, **repeated)
            layer.o_proj(attended)
            layer.gate_up_proj(hidden)
            layer.down_proj(product)
        model.lm_head(hidden[:, -1:].contiguous())

    return run
