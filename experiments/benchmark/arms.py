"""What is measured: one arm a column, ours under named kernels, and a reference that another module offers."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from cache.kv import KVCache
from decode.greedy import alone
from decode.state import State
from experiments.run.progress import Progress
from experiments.run.records import Row
from experiments.run.retained_live import RetainedLive
from experiments.run.session import left_out
from experiments.run.tasks import Task
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import COPIES
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError, refuse
from minimodel.load import load_model
from minimodel.numerics import NumericContract

COLUMNS = {  # name: attention kernel, linear kernel; the first is the default of every command
    "repeat_kv": ("repeat_kv", "plain"),
    "packed_gqa": ("packed_gqa", "plain"),
    "repeat_kv+packed": ("repeat_kv", "packed"),
    "packed_gqa+packed": ("packed_gqa", "packed"),
    "invariant": ("blocked", "tiled"),
}


class Arm(Protocol):
    """One column. `model` is called as `minimodel.decoder.Decoder` is and has its `logits`, `config`, `rules` and
    `numeric`, so that one and the same `decode.stepper.Stepper` feeds every arm.

    kernel: the attention kernel of ours that promises this arm's bits (under linear `plain`); its own for ours.
    """

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def model(self) -> Any: ...

    def new_cache(self, capacity: int, copies: int = COPIES) -> Any:
        """An empty cache; `len` of it is the tokens it holds."""
        ...

    def copy_cache(self, cache: Any, capacity: int) -> Any:
        """A copy that shares no storage, with room for `capacity` tokens."""
        ...

    def tensors(self, cache: Any) -> list[Tensor]:
        """Keys then values [B, H_kv, n, D] of every layer, in forward order."""
        ...

    def row(self, task: Task, prompt: State) -> Row:
        """The ledger row of the retained-live matrix: `RetainedLive`'s, or its equal."""
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
    """`numeric` under the kernels of a column."""
    return replace(numeric, kernels="/".join(COLUMNS[name]))


def open_ours(directory: Path, numeric: NumericContract, names: tuple[str, ...]) -> list[Ours]:
    """One arm a column name, in order. Columns that differ in attention alone share one set of weights."""
    loaded: dict[str, Decoder] = {}
    arms = []
    for name in names:
        contract = column_contract(name, numeric)
        if contract.linear not in loaded:
            loaded[contract.linear] = load_model(directory, contract)
        arms.append(Ours(name, _under(loaded[contract.linear], contract)))
    return arms


def open_reference(module: str, directory: Path, numeric: NumericContract) -> Arm:
    """`open_arm(directory, numeric)` of the named module: an `Arm` of another implementation, loaded as its users load
    it. InputError when there is no such module, or it offers no arm.
    """
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
    """The columns that this machine can run, and a sentence for each that it cannot."""
    without = left_out({name: column_contract(name, numeric) for name in names}, config, "experiments.benchmark")
    kept = tuple(name for name in names if name not in without)
    return kept, [f"column {name}: {reason}" for name, reason in without.items()]


def _under(model: Decoder, contract: NumericContract) -> Decoder:
    """The same weights under another attention kernel."""
    other = copy.copy(model)
    other.numeric, other.attend = contract, ATTENTION_KERNELS[contract.attention]
    return other
