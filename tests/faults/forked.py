"""A command in a forked child of this process: the same main as a user's, without importing everything again.

A child must use one thread only: OpenMP's other threads do not survive a fork, and the child would wait for them.
A child ends as a process does: with an exit code, by a signal that nothing can catch, or at a resource limit. Fork
needs no import and no start of threads, so that a run can be killed many times in the time of one start.
"""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.matrix import main as matrix_main
from experiments.run.progress import Progress

CRASHED = 99  # the exit code of a child whose command raised what no command may raise


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (None after a signal), the signal (0 without one), what it wrote."""

    code: int | None
    signal: int
    stdout: str
    stderr: str


def in_child(body: Callable[[], int], folder: Path, after: Callable[[int], None] | None = None) -> Ended:
    """Runs `body` in a forked child, which exits with its value. `after(pid)` runs here while the child lives.

    An exception in the child other than SystemExit is a traceback on its stderr and CRASHED. A child that is still
    there when this function is left is killed.
    """
    torch.set_num_threads(1)  # so that the child never waits for threads that the fork left behind
    paths = folder / "child.out", folder / "child.err"
    pid = os.fork()
    if pid == 0:
        become(body, *paths)
    try:
        if after is not None:
            after(pid)
        status = os.waitpid(pid, 0)[1]
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    texts = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
    return Ended(code if code >= 0 else None, max(-code, 0), *texts)


def become(body: Callable[[], int], out: Path, err: Path) -> None:
    """The child: its own output files, one thread, and an end without the parent's clean-up."""
    code = CRASHED
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for path, number in ((out, 1), (err, 2)):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(
    main: Any, name: str, arguments: list[object], before: Callable[[], Any] | None = None
) -> Callable[[], int]:
    """The body of `python -m experiments.NAME ARGUMENTS`; `before` runs first, in the child."""

    def body() -> int:
        sys.argv = [name, *map(str, arguments)]
        if before is not None:
            before()
        main(args=sys.argv[1:], prog_name=name)
        return CRASHED  # a command ends by sys.exit, always

    return body


def matrix(arguments: list[Any], before: Callable[[], Any] | None = None) -> Callable[[], int]:
    """The body of `python -m experiments.matrix ARGUMENTS`."""
    return command(matrix_main, "matrix", arguments, before)


def one_error(ended: Ended, *parts: str) -> None:
    """Exit code 2 and one line on stderr that is an error and holds every part (progress lines aside)."""
    assert ended.code == 2, ended
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in ended.stderr, ended
    for part in parts:
        assert part in lines[0], (part, lines[0])


def limit_file_size(size: int) -> None:
    """The kernel writes up to `size` bytes of any file and refuses the rest, as a full disk does: half a line is there.

    Python ignores the signal that comes with it, so a write fails with an error.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def limit_memory(more: int, kind: int = resource.RLIMIT_AS) -> None:
    """From now on this process may take `more` bytes beyond those that it holds, what its parent held included.

    kind: RLIMIT_AS, all addresses, or RLIMIT_DATA, which leaves out files that are mapped.
    """
    pages = Path("/proc/self/statm").read_text().split()
    held = int(pages[5 if kind == resource.RLIMIT_DATA else 0]) * resource.getpagesize()
    resource.setrlimit(kind, (held + more, resource.RLIM_INFINITY))


ROW_ENDS = ("Progress.row", "Progress.row_done")  # where a row begins and ends, in `experiments.run.progress`


def send_at_call(number: int, moment: int, path: Path | None = None) -> None:
    """From now on, count Python and C calls of this process; at the call `moment`, send it the signal `number`.

    A moment by calls is the same in every repetition, and lies inside library calls as often as in our own. `path`
    gets the count at every end of a row instead, for choosing moments.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event not in ("call", "c_call"):
            return
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), number)
        if path is not None and event == "call" and frame.f_code.co_qualname in ROW_ENDS:
            with open(path, "a") as file:
                file.write(f"{calls}\n")

    sys.setprofile(count)


def stop_after_rows(count: int, stop: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGINT)) -> None:
    """In the child: calls `stop`, an interruption by default, as the row after so many begins."""
    real, left = Progress.row, iter(range(count))

    def row(self: Progress, name: str) -> Any:
        if next(left, None) is None:
            stop()
        return real(self, name)

    Progress.row = row  # type: ignore[method-assign]


def kill_after(seconds: float) -> Callable[[int], None]:
    """For `after`: SIGKILL once so much time has passed."""

    def after(pid: int) -> None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    return after
