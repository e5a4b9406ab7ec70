"""What is measured: one arm per column, their common input, and the floor of our arms."""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.kv import KVCache
from decode.contract import Contract
from decode.greedy import alone
from decode.record import FunctionalRecord
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


class Arm(Protocol):
    """One column of the benchmark."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> str:
        """Our attention kernel that has this arm's bits under linear `plain`."""
        ...

    @property
    def model(self) -> Any:
        """Called as `minimodel.decoder.Decoder`, with its `logits`, `config`, `rules` and `numeric`: one
        `decode.stepper.Stepper` feeds every arm."""
        ...

    def new_cache(self, capacity: int, copies: int = COPIES) -> Any:
        """Returns an empty cache. Its `len` is the number of tokens it holds."""
        ...

    def copy_cache(self, cache: Any, capacity: int) -> Any:
        """Returns a copy that shares no storage, with room for `capacity` tokens."""
        ...

    def tensors(self, cache: Any) -> list[Tensor]:
        """Returns keys then values [B, H_kv, n, D] of every layer, in forward order."""
        ...

    def row(self, task: Task, prompt: State) -> Row:
        """Returns the ledger row of the retained-live matrix."""
        ...


@dataclass(frozen=True)
class Ours:
    """This project's decoder under one pair of kernels."""

    name: str
    model: Decoder

    @property
    def kernel(self) -> str:
        return self.model.numeric.attention

    def new_cache(self, capacity: int, copies: int = COPIES) -> KVCache:
        return KVCache.for_model(self.model, copies, capacity)

    def copy_cache(self, cache: KVCache, capacity: int) -> KVCache:
        return cache.copy(capacity)

    def tensors(self, cache: KVCache) -> list[Tensor]:
        return [tensor for _, _, tensor in cache.tensors()]

    def row(self, task: Task, prompt: State) -> Row:
        progress = Progress(1, 0, quiet=True).row(task.id)
        return alone(RetainedLive(self.model, [task], [prompt]).row(0, progress))


def column_contract(name: str, numeric: NumericContract) -> NumericContract:
    """Returns `numeric` under the kernels of a column."""
    return replace(numeric, kernels="/".join(COLUMNS[name]))


def open_ours(directory: Path, numeric: NumericContract, names: tuple[str, ...], copies: int = COPIES) -> list[Ours]:
    """Returns one arm per column, in order. Columns that differ in attention alone share one set of weights."""
    loaded: dict[str, Decoder] = {}
    arms = []
    for name in names:
        contract = column_contract(name, numeric)
        if contract.linear not in loaded:
            loaded[contract.linear] = load_model(directory, contract, copies)
        arms.append(Ours(name, _under(loaded[contract.linear], contract)))
    return arms


def open_reference(module: str, directory: Path, numeric: NumericContract) -> Arm:
    """Returns `open_arm(directory, numeric)` of the named module: another implementation, loaded as its users load it.
    InputError where there is no such module or it has no `open_arm`."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"--reference {module}: expected a module that can be imported, found {error}") from None
    opener: Callable[[Path, NumericContract], Arm] | None = getattr(found, "open_arm", None)
    if opener is None:
        raise refuse(f"--reference {module}", "a module with open_arm(directory, numeric)", "none in it")
    return opener(directory, numeric)


def available(
    names: tuple[str, ...], numeric: NumericContract, config: ModelConfig
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the columns that this machine can run, and one sentence per column that it cannot."""
    without = left_out({name: column_contract(name, numeric) for name in names}, config, "experiments.benchmark")
    kept = tuple(name for name in names if name not in without)
    return kept, [f"column {name}: {reason}" for name, reason in without.items()]


def _under(model: Decoder, contract: NumericContract) -> Decoder:
    """Returns the same weights under another attention kernel."""
    other = copy.copy(model)
    other.numeric, other.attend = contract, ATTENTION_KERNELS[contract.attention]
    return other


@dataclass(frozen=True)
class Workload:
    """Random ordinary tokens of one request: a fifth prompt, a fifth per branch, the rest merge. So the last tokens
    attend to every key, and no branch attends to another."""

    contract: Contract
    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, contract: Contract, length: int, device: torch.device) -> "Workload":
        """Returns `length` tokens. Blocks scale with the length: a shorter workload is no prefix of a longer one."""
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

    def record(self, length: int) -> FunctionalRecord:
        """Returns the record of a stepper that has fed the first `length` tokens."""
        visibility = self.contract.rules.visibility
        return FunctionalRecord.of_state(self.tokens[:length], self.roles[:length], visibility)


class Floor:
    """Runs the linear and SDPA calls of one forward call of T tokens over S keys, and of the last logits, back to back.

    The linear calls are the model's own, the inputs fixed random numbers, and K/V is laid out as in the model's cache.
    """

    def __init__(self, model: Decoder, length: int, key_length: int, mask: Tensor) -> None:
        """mask: bool [B, 1, T, S]."""
        config, numeric = model.config, model.numeric
        assert numeric.attention in FLOORED, "only a kernel of one SDPA call per layer has a floor"
        self._model, self._mask = model, mask
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(numeric.torch_dtype).to(numeric.torch_device)

        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._hidden = random(COPIES, length, config.hidden_size)
        self._attended = random(COPIES, length, heads * size)
        self._product = random(COPIES, length, config.intermediate_size)
        self._query = random(COPIES, length, heads, size).transpose(1, 2)
        if numeric.attention == "packed_gqa" and length == 1:
            self._query = self._query.reshape(COPIES, kv_heads, heads // kv_heads, size)
        self._cache = KVCache.for_model(model, COPIES, key_length)
        for layer in range(config.num_hidden_layers):
            self._cache.append(layer, *(random(COPIES, kv_heads, key_length, size) for _ in range(2)))

    def __call__(self) -> None:
        """Runs every product of the call once."""
        hidden, scale = self._hidden, self._model.config.head_dim**-0.5
        grouped = self._query.shape[1] != self._model.config.num_key_value_heads
        for index, layer in enumerate(self._model.layers):
            layer.qkv_proj(hidden)
            keys, values = self._cache.keys(index), self._cache.values(index)
            F.scaled_dot_product_attention(
                self._query, keys, values, attn_mask=self._mask, scale=scale, enable_gqa=grouped
            )
            layer.o_proj(self._attended)
            layer.gate_up_proj(hidden)
            layer.down_proj(self._product)
        self._model.lm_head(hidden[:, -1:].contiguous())
