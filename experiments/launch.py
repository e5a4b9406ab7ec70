"""Runs torchrun and ends with the experiment's exit code, without a traceback.

Takes torchrun's own arguments and starts ranks through PyTorch's elastic launcher:

    python -m experiments.launch --nproc-per-node 2 -m experiments.matrix --dtype bf16

torchrun itself ends with code 1 whatever code a rank ended with. Here the code is that of the rank that failed first
(2 bad input, 3 a gate failed, 130 interrupted, 128 + N for signal N), or 0.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

import click
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from experiments.run.exits import INTERRUPTED


def launch(arguments: Sequence[str]) -> int:
    """Runs the job and returns its exit code. torchrun's own usage errors end the process with code 2."""
    # torchrun would set it too, with a warning; every rank applies its own --threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks print their own errors
    try:
        torchrun.run(torchrun.parse_args(list(arguments)))
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode < 0:
            click.echo(f"rank {rank} was ended by {signal.Signals(-first.exitcode).name}", err=True)
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    except SignalException:
        return INTERRUPTED
    return 0


@click.command(
    help=__doc__,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TORCHRUN-ARGUMENTS...")
def main(arguments: tuple[str, ...]) -> None:
    sys.exit(launch(arguments))


if __name__ == "__main__":
    main(prog_name="python -m experiments.launch")
