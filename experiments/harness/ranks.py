"""Several processes for one run, as PyTorch's elastic launcher starts them: who this one is, and what they tell each
other.

    torchrun --nproc-per-node N -m experiments.NAME ...

asks for it through the environment variables RANK and WORLD_SIZE. No tensor travels between ranks, so no process group
is made: the launcher's key-value store is all that is used, on CPU and CUDA alike.
"""

import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from functools import cache
from typing import Any

from minimodel.errors import InputError, refuse

SHARDED = (
    "matrix",
    "fixed_prefix",
    "bridge",
    "transplant",
    "replication",
    "batch_control",
    "stock_control",
    "causes",
    "carrier",
)
PATIENCE = timedelta(minutes=5)  # for reaching the store, never for another rank's rows
POLL_SECONDS = 0.1
FAILURES, FAILED, ROWS, END = "failures", "failed", "rows", "end"  # keys of the store


class RankFailed(Exception):
    """Another rank of the job ended first and said why; this one ends with the same exit code, in silence."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another rank ended with code {code}")
        self.code = code


class Ranks:
    """This process among the `world_size` of a job. Rank 0 leads: it alone holds the run directory and speaks.

    store: get, set, add and check of torch.distributed.Store, the job's own. gone: the exit code when it cannot be
    reached any more, because the launcher or the process that held it has ended.
    """

    def __init__(self, rank: int, world_size: int, local_world_size: int, store: Any, gone: int = 130) -> None:
        self.rank, self.world_size, self.local_world_size = rank, world_size, local_world_size
        self._store, self._gone = store, gone

    def tell(self, key: str, value: str = "") -> None:
        """Says something once to all ranks."""
        self._ask(lambda: self._store.set(key, value))

    def hear(self, key: str, meanwhile: Callable[[], None] | None = None) -> str:
        """Waits until some rank has said `key`, however long its rows take; RankFailed when a rank fails before."""
        while not self._ask(lambda: self._store.check([key])):
            self.check()
            if meanwhile is not None:
                meanwhile()
            time.sleep(POLL_SECONDS)
        return str(self._ask(lambda: self._store.get(key)).decode("utf-8"))

    def check(self) -> None:
        """RankFailed when another rank has failed."""
        if self._ask(lambda: self._store.check([FAILED])):
            raise RankFailed(int(self._ask(lambda: self._store.get(FAILED))))

    def fail(self, code: int) -> bool:
        """Tells the others to end with `code`; True for the first to fail, whose message is the job's one line.

        Not after the end: the launcher stops ranks that are still leaving when rank 0's verdict is a failure.
        """
        try:
            first = not self._store.check([END]) and self._store.add(FAILURES, 1) == 1
            if first:
                self._store.set(FAILED, str(code))
        except RuntimeError:  # the store is gone: nobody is left to speak in our place
            return True
        return bool(first)

    def count_row(self) -> None:
        """One more row is on disk."""
        self._ask(lambda: self._store.add(ROWS, 1))

    def rows_counted(self) -> int:
        """Rows that all ranks have written since the job began."""
        return int(self._ask(lambda: self._store.add(ROWS, 0)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError:  # torch's DistNetworkError and DistStoreError
            raise RankFailed(self._gone) from None


def current() -> Ranks | None:
    """The job that this process belongs to, None for a process of its own. InputError when the job cannot be joined."""
    return None if world(os.environ) == 1 else _join()


@cache
def _join() -> Ranks:
    from torch import distributed

    if not distributed.is_available():
        raise InputError("torchrun: expected a torch built with torch.distributed, found one without")
    try:
        store, rank, world_size = next(iter(distributed.rendezvous("env://", timeout=PATIENCE)))
    except (RuntimeError, ValueError) as error:
        raise InputError(f"torchrun: expected its environment and its store, found: {error}") from None
    return Ranks(rank, world_size, number(os.environ, "LOCAL_WORLD_SIZE", world_size), store)


def world(environment: Mapping[str, str]) -> int:
    """WORLD_SIZE where RANK stands beside it, else 1. InputError for one that is no number."""
    return number(environment, "WORLD_SIZE", 1) if "RANK" in environment else 1


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit():
        raise refuse(f"environment variable {name}", "a whole number", text)
    return int(text)


def require_sharded(module: str) -> None:
    """InputError for a command that has no rows to share out: it would run once per rank, over itself."""
    size = world(os.environ)
    if size > 1 and module not in {f"experiments.{name}" for name in SHARDED}:
        raise InputError(f"{module}: expected one process, found torchrun's WORLD_SIZE {size}; ranks share rows only")


def claim_devices(device: str, environment: MutableMapping[str, str]) -> None:
    """Makes this local rank's CUDA devices the only ones that its process sees, before CUDA is used.

    device: cuda, or cuda:0,cuda:1,... for k devices a rank; local rank r takes the r-th k of those that are visible.
    Each rank then calls its own cuda:0, as a single process would: ledgers name devices, and must not tell ranks apart.
    """
    names = device.split(",")
    if world(environment) == 1 or not any(name.startswith("cuda") for name in names):
        return
    if names not in (["cuda"], [f"cuda:{i}" for i in range(len(names))]):
        raise refuse("device, counted within each rank", "cuda, or cuda:0,cuda:1,... for several a rank", device)
    local_rank, ranks = number(environment, "LOCAL_RANK", 0), number(environment, "LOCAL_WORLD_SIZE", 1)
    wanted = ranks * len(names)
    given = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [str(i) for i in range(wanted)] if given is None else [name for name in given.split(",") if name]
    if len(visible) < wanted:
        raise refuse("CUDA_VISIBLE_DEVICES", f"at least {wanted} devices for {ranks} local ranks", given)
    first = local_rank * len(names)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + len(names)])
