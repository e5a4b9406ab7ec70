"""Exit codes and interruptions, the same for every command.

0 done; 2 bad input or usage (one line: what, where, expected, found); 3 an integrity gate failed; 130 interrupted; 141
the reader of stdout or stderr has closed it (128 + SIGPIPE, as for any program in a pipe).
"""

import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import click

from experiments import end_quietly
from experiments.run import ranks
from minimodel.errors import CopiesDiffer, InputError
from stats.errors import StatsInputError

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
        ranks.require_sharded(module)
        ranks.current()
        code = command()
    except ranks.RankFailed as failure:
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


def _job() -> ranks.Ranks | None:
    """Returns the job; a rank that fails before it joined does so now. None where the job cannot be joined."""
    try:
        return ranks.current(LAST_PATIENCE)
    except (InputError, KeyboardInterrupt):
        return None


def resume_command(module: str) -> str:
    """Returns the command line that continues this run: the same, without --fresh."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    start = ["python"] if ranks.world(os.environ) == 1 else ranks.launcher()
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
