"""Several processes for one run, as PyTorch's elastic launcher starts them: rank identity and signalling.

    torchrun --nproc-per-node N -m experiments.NAME ...

The environment variables RANK and WORLD_SIZE make a process one rank of a job. No tensor travels between ranks, so no
process group is made: the launcher's key-value store is all that is used, on CPU and CUDA alike.

Exit codes and interruptions, the same for every command.

0 done; 2 bad input or usage (one line: what, where, expected, found); 3 an integrity gate failed; 130 interrupted; 141
the reader of stdout or stderr has closed it (128 + SIGPIPE, as for any program in a pipe).
"""

import io
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from experiments import end_quietly
from minimodel.errors import CopiesDiffer, InputError, refuse
from stats.errors import StatsInputError

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


DONE, BAD_INPUT, GATE_FAILED, INTERRUPTED, PIPE_CLOSED = 0, 2, 3, 130, 141
LAST_PATIENCE = timedelta(seconds=5)  # for joining the job only to end in it
NO_MEMORY = "error: memory: expected more free memory or address space (see ulimit -v), found too little"


def run_command(command: Callable[[], int], module: str, resumes: bool = True) -> None:
    """Runs a command's body and exits with its code; bad input becomes one line on stderr and code 2.

    SIGTERM is taken like Ctrl-C: the row in work is abandoned, what is written stays, the resuming command is shown.
    Of several ranks only the first that fails prints; the others end with its code.
    """
    if signal.getsignal(signal.SIGINT) is end_quietly:  # the imports are over
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path that is not UTF-8 is printed with its escape
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        require_sharded(module)
        current()
        code = command()
    except RankFailed as failure:
        code = failure.code
    except CopiesDiffer as fault:
        start_again_reproducibly(module, fault)
        code = _printed(BAD_INPUT, f"error: {one_line(fault)}")
    except (InputError, StatsInputError) as error:
        code = _printed(BAD_INPUT, f"error: {one_line(error)}")
    except BrokenPipeError as error:
        code = _broken(error)
    except MemoryError:
        code = _printed(BAD_INPUT, NO_MEMORY)
    except RuntimeError as error:
        if not _is_allocation(error):
            raise
        code = _printed(BAD_INPUT, NO_MEMORY)
    except OSError as error:
        code = _printed(BAD_INPUT, f"error: {error.filename or 'file'}: {error.strerror or one_line(error)}")
    except KeyboardInterrupt:
        lines = ["interrupted", f"resume with: {resume_command(module)}"]
        code = _printed(INTERRUPTED, *lines[: 1 + resumes])
    finally:
        signal.signal(signal.SIGTERM, previous)
    _give_up_output()
    sys.exit(code)


def start_again_reproducibly(module: str, fault: CopiesDiffer) -> None:
    """Replaces this process by the same command with MKL's reproducible mode, which is read when torch loads.

    Returns where this process does not run that command alone.
    """
    from minimodel.selfcheck import REPRODUCIBLE

    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is None or main.name.removesuffix(".__main__") != module:
        return
    setting = " ".join(f"{name}={value}" for name, value in REPRODUCIBLE.items())
    click.echo(f"starting again with {setting}: {one_line(fault).partition(';')[0]}", err=True)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **REPRODUCIBLE})


def _printed(code: int, *lines: str) -> int:
    """Prints the lines, unless another rank of this job failed first, and returns the code."""
    job = _job()
    if job is None or job.fail(code):
        with suppress(BrokenPipeError):
            for line in lines:
                say(line, err=True)
    return code


def _broken(error: BrokenPipeError) -> int:
    """Returns the code for a closed stdout or stderr, without printing. A named pipe is an error."""
    if error.filename is not None:
        return _printed(BAD_INPUT, f"error: {error.filename}: {error.strerror}")
    return _printed(PIPE_CLOSED)


def _give_up_output() -> None:
    """Discards what a closed or full output did not take: the interpreter would fail on it again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):  # ValueError: a stream without a file, as a test runner's
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_allocation(error: RuntimeError) -> bool:
    """Whether torch could not allocate: OutOfMemoryError on an accelerator, a plain RuntimeError on the CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _job() -> Ranks | None:
    """Returns the job; a rank that fails before it joined does so now. None where the job cannot be joined."""
    try:
        return current(LAST_PATIENCE)
    except (InputError, KeyboardInterrupt):
        return None


def resume_command(module: str) -> str:
    """Returns the command line that continues this run: the same, without --fresh."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    start = ["python"] if world(os.environ) == 1 else launcher()
    return shlex.join([*start, "-m", module, *arguments])


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


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


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
