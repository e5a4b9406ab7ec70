"""How a command ends, alone or as one rank of several: exit codes, interruptions, the signals between ranks.

0 done; 2 bad input or usage (one line: what, where, expected, found); 3 an integrity gate failed; 130 interrupted; 141
the reader of stdout or stderr has closed it (128 + SIGPIPE, as for any program in a pipe).

    torchrun --nproc-per-node N -m experiments.NAME ...

The environment variables RANK and WORLD_SIZE make a process one rank of a job. No tensor travels between ranks, so no
process group is made: the launcher's key-value store is all that is used, on CPU and on CUDA.
"""

import functools
import io
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import click

from experiments import end_quietly
from minimodel.errors import CopiesDiffer, InputError, refuse
from stats.errors import StatsInputError

DONE, BAD_INPUT, GATE_FAILED, INTERRUPTED, PIPE_CLOSED = 0, 2, 3, 130, 141
PATIENCE = timedelta(minutes=1)  # for reaching the store, never for another rank's rows
POLL_SECONDS = 0.1
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun
FAILURES, FAILED, COUNTED, END = "failures", "failed", "rows", "end"  # keys of the store


class RankFailed(Exception):
    """Another rank of the job ended first and printed why; this one ends with its exit code, which is the argument."""


class Ranks:
    """This process among the `world_size` of a job. Rank 0 leads: it alone holds the run directory and prints.

    store: set, get, check and add of torch.distributed.Store. One process without a launcher is a job of one rank. The
    job ends as interrupted when the store cannot be reached any more, because the launcher has ended.
    """

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.rank, self.world_size, self._store = rank, world_size, store

    def tell(self, key: str, value: str = "") -> None:
        """Sets a key once for all ranks."""
        self._store_call("set", key, value)

    def hear(self, key: str, meanwhile: Callable[[], None] | None = None) -> str:
        """Waits until some rank has set `key`, however long its rows take, and returns its value.

        RankFailed when a rank fails before.
        """
        while not self._store_call("check", [key]):
            self.check()
            if meanwhile is not None:
                meanwhile()
            time.sleep(POLL_SECONDS)
        return str(self._store_call("get", key).decode("utf-8"))

    def check(self) -> None:
        """Raises RankFailed when another rank has failed."""
        if self._store_call("check", [FAILED]):
            raise RankFailed(int(self._store_call("get", FAILED)))

    def fail(self, code: int) -> bool:
        """Makes the other ranks end with `code`. Returns True for the first to fail, which alone prints an error.

        After END it returns False: where rank 0's verdict is a failure, the launcher stops ranks that have not left
        yet, and these print nothing.
        """
        try:
            first = not self._store.check([END]) and self._store.add(FAILURES, 1) == 1
            if first:
                self._store.set(FAILED, str(code))
        except RuntimeError:  # the store is gone, and with it every other rank
            return True
        return bool(first)

    def count(self, rows: int = 0) -> int:
        """Adds rows that this rank has written; returns those that all ranks have written since the job began."""
        return int(self._store_call("add", COUNTED, rows))

    def _store_call(self, name: str, *given: Any) -> Any:
        try:
            return getattr(self._store, name)(*given)
        except RuntimeError:  # torch's DistNetworkError and DistStoreError
            raise RankFailed(INTERRUPTED) from None


class OwnStore:
    """The store of a job of one rank, in its own memory: a torch without torch.distributed decodes in one process."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._kept[key] = value.encode("utf-8")

    def get(self, key: str) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def add(self, key: str, number: int) -> int:
        total = int(self._kept.get(key, b"0")) + number
        self.set(key, str(total))
        return total


def current() -> Ranks:
    """Returns the job that this process belongs to, joined once. InputError when torchrun's store cannot be reached."""
    size = world(os.environ)
    if size == 1:
        return Ranks(0, 1, OwnStore())
    rank, port = _number(os.environ, "RANK", 0), _number(os.environ, "MASTER_PORT", 0)
    return _join(rank, size, os.environ.get("MASTER_ADDR", ""), port, os.environ.get(ATTEMPT, "0"))


@functools.cache
def _join(rank: int, size: int, host: str, port: int, attempt: str) -> Ranks:
    from torch import distributed

    if not distributed.is_available():
        raise InputError("torchrun: expected a torch built with torch.distributed, found one without")
    try:
        # where nothing listens torch would try again for a long time, which no signal can end
        socket.create_connection((host, port), PATIENCE.total_seconds()).close()
        store = distributed.TCPStore(host, port, is_master=False, timeout=PATIENCE)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        found = str(error).partition("\n")[0]  # torch adds its C++ frames below
        raise InputError(
            f"torchrun: expected its store at MASTER_ADDR:MASTER_PORT {host}:{port}, found: {found}"
        ) from None
    # the launcher keeps one store over its restarts: what one attempt has set must not reach the next
    return Ranks(rank, size, distributed.PrefixStore(f"stage-replay/{attempt}", store))


def world(environment: Mapping[str, str]) -> int:
    """Returns WORLD_SIZE where RANK stands beside it, else 1. InputError for one that is no number."""
    return _number(environment, "WORLD_SIZE", 1) if "RANK" in environment else 1


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit():
        raise refuse(f"environment variable {name}", "a whole number", text)
    return int(text)


def claim_devices(device: str, environment: MutableMapping[str, str]) -> None:
    """Makes this local rank's CUDA devices the only ones that its process sees, before CUDA is used.

    device: cuda, or cuda:0,cuda:1,... for k devices per rank; local rank r takes the r-th k of the visible ones. Each
    rank then calls its own cuda:0, as a single process would: ledgers name devices, and must not depend on the rank.
    """
    names = device.split(",")
    if world(environment) == 1 or not any(name.startswith("cuda") for name in names):
        return
    if names not in (["cuda"], [f"cuda:{i}" for i in range(len(names))]):
        raise refuse("device, counted within each rank", "cuda, or cuda:0,cuda:1,... for several per rank", device)
    local_rank, ranks = _number(environment, "LOCAL_RANK", 0), _number(environment, "LOCAL_WORLD_SIZE", 1)
    wanted, first = ranks * len(names), local_rank * len(names)
    given = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [str(i) for i in range(wanted)] if given is None else [name for name in given.split(",") if name]
    if len(visible) < wanted:
        raise refuse("CUDA_VISIBLE_DEVICES", f"at least {wanted} devices for {ranks} local ranks", given)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + len(names)])


def run_command(command: Callable[[], int], module: str, resumes: bool = True, ranks: bool = False) -> None:
    """Runs a command's body and exits with its code; bad input becomes one line on stderr and code 2.

    SIGTERM is taken like Ctrl-C: the row in work is abandoned, what is written stays, the resuming command is shown.
    ranks: torchrun's ranks share the command's rows. Only the first that fails prints; the others end with its code.
    """
    if signal.getsignal(signal.SIGINT) is end_quietly:  # the imports are over
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path that is not UTF-8 is printed with its escape
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")

    previous = signal.getsignal(signal.SIGTERM)
    job: Ranks | None = None
    try:
        job = current()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if job.world_size > 1 and not ranks:
            found = f"torchrun's WORLD_SIZE {job.world_size}; ranks share rows only"
            raise InputError(f"{module}: expected one process, found {found}")
        code = command()
    except RankFailed as failure:
        code = int(failure.args[0])
    except KeyboardInterrupt:
        code = INTERRUPTED
        _print_first(job, code, ["interrupted", *([f"resume with: {resume_command(module)}"] if resumes else [])])
    except Exception as error:
        if isinstance(error, CopiesDiffer):
            start_again_reproducibly(module, error)
        code, text = _ending(error)
        _print_first(job, code, [f"error: {text}"] if text else [])
    finally:
        signal.signal(signal.SIGTERM, previous)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # closed or full: the interpreter would fail on it again at its end
            with suppress(OSError, ValueError):  # ValueError: a stream without a file, as a test runner's
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def as_command(
    module: str, resumes: bool = False, ranks: bool = False
) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Returns a decorator that runs a function, which returns an exit code, through `run_command`."""

    def decorate(body: Callable[..., int]) -> Callable[..., None]:
        @wraps(body)
        def main(**given: Any) -> None:
            run_command(lambda: body(**given), module, resumes, ranks)

        return main

    return decorate


def _ending(error: Exception) -> tuple[int, str]:
    """Returns exit code and message of what ends a command. Raises the error again where it is a fault of the code."""
    if isinstance(error, InputError | StatsInputError):
        return BAD_INPUT, one_line(error)
    if isinstance(error, MemoryError) or is_allocation(error):
        return BAD_INPUT, "memory: expected more free memory or address space (see ulimit -v), found too little"
    if isinstance(error, BrokenPipeError) and error.filename is None:  # stdout or stderr; a named pipe is an error
        return PIPE_CLOSED, ""
    if isinstance(error, OSError):
        return BAD_INPUT, f"{error.filename or 'file'}: {error.strerror or one_line(error)}"
    raise error


def is_allocation(error: Exception) -> bool:
    """Returns whether torch could not allocate: OutOfMemoryError on an accelerator, a plain RuntimeError on the CPU."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    )


def _print_first(job: Ranks | None, code: int, lines: list[str]) -> None:
    """Prints the lines on stderr, unless another rank of this job failed first."""
    if job is None or job.fail(code):
        with suppress(BrokenPipeError):
            for line in lines:
                say(line, err=True)


def start_again_reproducibly(module: str, fault: CopiesDiffer) -> None:
    """Replaces this process by the same command with MKL's reproducible mode, which is read when torch loads.

    Does nothing where this process was not started as `python -m MODULE`.
    """
    from minimodel.selfcheck import REPRODUCIBLE

    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is None or main.name.removesuffix(".__main__") != module:
        return
    setting = " ".join(f"{name}={value}" for name, value in REPRODUCIBLE.items())
    click.echo(f"starting again with {setting}: {one_line(fault).partition(';')[0]}", err=True)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **REPRODUCIBLE})


def resume_command(module: str) -> str:
    """Returns the command line that continues this run: the same, without --fresh.

    Under torchrun it begins with the words that started the ranks, where the launcher's command line can be read.
    """
    start, arguments = ["python"], [argument for argument in sys.argv[1:] if argument != "--fresh"]
    if world(os.environ) > 1:
        try:
            words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")[:-1]
        except OSError:  # another system than Linux
            words = []
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        start = launcher_words(words, module) or ["torchrun", "--nproc-per-node", ranks]
    return shlex.join([*start, "-m", module, *arguments])


def launcher_words(words: list[str], module: str) -> list[str]:
    """Returns a launcher's command line up to `-m MODULE`, without its paths; [] where it does not start the module."""
    ends = [i for i in range(2, len(words)) if words[i : i + 2] == ["-m", module]]
    if not ends:
        return []
    return ["python" if words[1] == "-m" else Path(words[1]).name, *words[1 if words[1] == "-m" else 2 : ends[0]]]


def one_line(error: object) -> str:
    """Returns a message as one line, with control characters as their escapes."""
    return readable(" ".join(str(error).split()))


def say(text: str, err: bool = False) -> None:
    """Prints a text line by line as `readable` gives it."""
    click.echo("\n".join(map(readable, text.split("\n"))), err=err)


def readable(text: str) -> str:
    """Returns the text with every character that is not printable as its escape.

    An id or a path may hold a terminal's control sequences, or half a character where it is not UTF-8.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back while a record is written; they take effect right after."""
    pending: list[int] = []
    old = {s: signal.signal(s, lambda signum, _: pending.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if pending:
            raise KeyboardInterrupt
