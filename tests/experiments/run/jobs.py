"""A job of several ranks as the elastic launcher runs it, each rank forked from this process: no imports, no launcher.

The store lives here, as it lives in the launcher's agent. As there, the first rank that fails ends the job: the others
get SIGTERM, and the job's code is that rank's.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import TCPStore

from tests.faults.forked import become

SECONDS = 120


@dataclass(frozen=True)
class Job:
    """How a job ended: the first failing rank's code (128 + N for signal N, 0 if none failed), and what ranks said."""

    code: int
    codes: list[int]
    stdout: list[str]
    stderr: list[str]

    def errors(self) -> list[str]:
        """The lines on stderr of all ranks that are not about progress."""
        spoken = ("error: ", "interrupted", "resume with: ", "Traceback")
        return [line for text in self.stderr for line in text.splitlines() if line.startswith(spoken)]


def run_job(
    bodies: Sequence[Callable[[], int]], folder: Path, meanwhile: Callable[[list[int]], None] | None = None
) -> Job:
    """One rank a body. `meanwhile(pids)` is called again and again while they run."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so that no child waits for threads that the fork left behind
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = [_fork(body, rank, len(bodies), store.port, folder) for rank, body in enumerate(bodies)]
    codes: dict[int, int] = {}
    try:
        code = _watch(pids, codes, meanwhile)
    finally:
        for rank in set(range(len(pids))) - set(codes):
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
    texts = [[(folder / f"{rank}.{name}").read_text() for rank in range(len(bodies))] for name in ("out", "err")]
    return Job(code, [codes[rank] for rank in range(len(bodies))], *texts)


def _watch(pids: list[int], codes: dict[int, int], meanwhile: Callable[[list[int]], None] | None) -> int:
    deadline, first = time.monotonic() + SECONDS, 0
    while len(codes) < len(pids):
        assert time.monotonic() < deadline, f"ranks hang; ended so far: {codes}"
        for rank in set(range(len(pids))) - set(codes):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                codes[rank] = code if code >= 0 else 128 - code
        if first == 0 and any(codes.values()):
            first = next(code for code in codes.values() if code)
            for rank in set(range(len(pids))) - set(codes):
                os.kill(pids[rank], signal.SIGTERM)
        if meanwhile is not None:
            meanwhile(pids)
        time.sleep(0.01)
    return first


def _fork(body: Callable[[], int], rank: int, size: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ |= {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        become(body, folder / f"{rank}.out", folder / f"{rank}.err")
    return pid
