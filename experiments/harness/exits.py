"""Exit codes and interruptions, the same for every command.

0 done; 2 bad input or usage (one line: what, where, expected, found); 3 an integrity gate failed; 130 interrupted.
"""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from experiments.harness import ranks
from minimodel.errors import InputError
from stats.errors import StatsInputError

DONE, BAD_INPUT, GATE_FAILED, INTERRUPTED = 0, 2, 3, 130


def run_command(command: Callable[[], int], module: str, resumes: bool = True) -> None:
    """Runs a command's body and exits with its code; bad input becomes one line on stderr and code 2.

    SIGTERM is taken like Ctrl-C: the row at hand is abandoned, what is written stays, the resuming command is shown.
    Of several ranks the first that fails speaks; the others end with its code.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        ranks.require_sharded(module)
        ranks.current()
        code = command()
    except ranks.RankFailed as failure:
        code = failure.code
    except (InputError, StatsInputError) as error:
        code = _told(BAD_INPUT, f"error: {one_line(error)}")
    except OSError as error:
        code = _told(BAD_INPUT, f"error: {error.filename or 'file'}: {error.strerror or one_line(error)}")
    except KeyboardInterrupt:
        lines = ["interrupted", f"resume with: {resume_command(module)}"]
        code = _told(INTERRUPTED, *lines[: 1 + resumes])
    finally:
        signal.signal(signal.SIGTERM, previous)
    sys.exit(code)


def _told(code: int, *lines: str) -> int:
    """Says the lines, unless another rank of this job has failed first and spoken."""
    job = _job()
    if job is None or job.fail(code):
        for line in lines:
            click.echo(line, err=True)
    return code


def _job() -> ranks.Ranks | None:
    """The job, joined now by a rank that fails so early that it had not done so; None where it cannot be joined."""
    try:
        return ranks.current()
    except InputError:
        return None


def resume_command(module: str) -> str:
    """The command line that continues this run: the same, without --fresh."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    job = _job()
    start = "python -m" if job is None else f"torchrun --nproc-per-node {job.local_world_size} -m"
    return " ".join([start, module, shlex.join(arguments)]).strip()


def one_line(error: object) -> str:
    """A message without line breaks or control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


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
