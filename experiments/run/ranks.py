"""Several processes for one run, as PyTorch's elastic launcher starts them: rank identity and signalling.

    torchrun --nproc-per-node N -m experiments.NAME ...

The environment variables RANK and WORLD_SIZE make a process one rank of a job. No tensor travels between ranks, so no
process group is made: the launcher's key-value store is all that is used, on CPU and CUDA alike.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
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
ATTEMPT, AGENT = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun
FAILURES, FAILED, ROWS, END = "failures", "failed", "rows", "end"  # keys of the store


_JOINED: "dict[tuple[str, ...], Ranks | InputError]" = {}  # by rank, address and attempt: joining is tried once


class RankFailed(Exception):
    """Another rank of the job ended first and printed why; this one ends with the same exit code, without printing."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another rank ended with code {code}")
        self.code = code


class Ranks:
    """This process among the `world_size` of a job. Rank 0 leads: it alone holds the run directory and prints.

    store: get, set, add and check of torch.distributed.Store, the job's own. gone: the exit code when it cannot be
    reached any more, because the launcher or the process that held it has ended.
    """

    def __init__(self, rank: int, world_size: int, store: Any, gone: int = 130) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._gone = store, gone

    def tell(self, key: str, value: str = "") -> None:
        """Sets a key once for all ranks."""
        self._ask(lambda: self._store.set(key, value))

    def hear(self, key: str, meanwhile: Callable[[], None] | None = None) -> str:
        """Waits until some rank has set `key`, however long its rows take, and returns its value.

        RankFailed when a rank fails before.
        """
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
        """Makes the other ranks end with `code`. Returns True for the first to fail, which alone prints an error.

        Not after the end: the launcher stops ranks that are still leaving when rank 0's verdict is a failure.
        """
        try:
            first = not self._store.check([END]) and self._store.add(FAILURES, 1) == 1
            if first:
                self._store.set(FAILED, str(code))
        except RuntimeError:  # the store is gone, and with it every other rank
            return True
        return bool(first)

    def count_row(self) -> None:
        """Counts one more row on disk."""
        self._ask(lambda: self._store.add(ROWS, 1))

    def rows_counted(self) -> int:
        """Returns the rows that all ranks have written since the job began."""
        return int(self._ask(lambda: self._store.add(ROWS, 0)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError:  # torch's DistNetworkError and DistStoreError
            raise RankFailed(self._gone) from None


def current(patience: timedelta = PATIENCE) -> Ranks | None:
    """Returns the job that this process belongs to, None for a process without one.

    InputError when the job cannot be joined within `patience`; that is tried once per job.
    """
    if world(os.environ) == 1:
        return None
    place = tuple(os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", ATTEMPT))
    if place not in _JOINED:
        _JOINED[place] = InputError("torchrun: interrupted before its store was reached")
        try:
            _JOINED[place] = _join(patience)
        except InputError as error:
            _JOINED[place] = error
    joined = _JOINED[place]
    if isinstance(joined, InputError):
        raise joined
    return joined


def _join(patience: timedelta) -> Ranks:
    from torch import distributed

    if not distributed.is_available():
        raise InputError("torchrun: expected a torch built with torch.distributed, found one without")
    _require_reachable(patience)
    outcome: list[Any] = []

    def join() -> None:
        try:
            outcome.extend(next(iter(distributed.rendezvous("env://", timeout=patience))))
        except (RuntimeError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=join, daemon=True)  # a signal cannot interrupt torch's own waiting
    thread.start()
    deadline = time.monotonic() + patience.total_seconds() + 1
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(POLL_SECONDS)
    if len(outcome) != 3:
        found = str(outcome[0]).partition("\n")[0] if outcome else "no answer"  # torch adds its C++ frames below
        raise InputError(f"torchrun: expected its environment and its store, found: {found}")
    store, rank, world_size = outcome
    # the launcher keeps one store over its restarts: what an attempt has said must not reach the next
    store = distributed.PrefixStore(f"stage-replay/{os.environ.get(ATTEMPT, '0')}", store)
    return Ranks(rank, world_size, store)


def _require_reachable(patience: timedelta) -> None:
    """InputError when nothing listens at the store's address in time; rank 0 without an agent is the store."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or (os.environ["RANK"] == "0" and os.environ.get(AGENT) != "True"):
        return  # torch itself says which of them is missing
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=min(5.0, patience.total_seconds())).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() >= deadline:
                expected = f"expected its store at {host}:{port} within {patience.total_seconds():g} s"
                raise InputError(f"torchrun: {expected}, found: {getattr(error, 'strerror', None) or error}") from None
        time.sleep(POLL_SECONDS)


def launcher() -> list[str]:
    """Returns the words that start this job's ranks, up to the module: the launcher's own, where they can be read.

    Elsewhere they are put together from the environment of a rank, which does not hold all of torchrun's options.
    """
    try:
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:  # another system than Linux
        words = []
    return launcher_words(words) or _known_options()


def launcher_words(words: list[str]) -> list[str]:
    """Returns a launcher's command line up to `-m experiments.NAME`, without its paths; [] for any other command."""
    ends = [i for i in range(2, len(words) - 1) if words[i] == "-m" and words[i + 1].startswith("experiments.")]
    if not ends:
        return []
    if words[1] == "-m":  # the first -m is the launcher's own
        inner = [i for i in ends if i > 2]
        return ["python", *words[1 : inner[0]]] if inner else []
    return ["torchrun", *words[2 : ends[0]]] if Path(words[1]).name == "torchrun" else []


def _known_options() -> list[str]:
    given = {
        "--nnodes": number(os.environ, "GROUP_WORLD_SIZE", 1),
        "--nproc-per-node": number(os.environ, "LOCAL_WORLD_SIZE", 1),
        "--max-restarts": number(os.environ, "TORCHELASTIC_MAX_RESTARTS", 0),
    }
    usual = {"--nnodes": 1, "--max-restarts": 0}
    return ["torchrun", *(word for name, n in given.items() if n != usual.get(name) for word in (name, str(n)))]


def world(environment: Mapping[str, str]) -> int:
    """Returns WORLD_SIZE where RANK stands beside it, else 1. InputError for one that is no number."""
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
