"""A job of several ranks as the elastic launcher runs it, each rank forked from this process: no imports, no launcher.

The store lives here, as it lives in the launcher's agent. As there, the first rank that fails ends the job: the others
get SIGTERM, and the job's code is that rank's. The store is made once all ranks are forked, and its port is sent to
each: its thread looks up the name of every peer, and a rank forked meanwhile would wait for a lock of the C library.
"""

import json
import os
import signal
import time
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

from tests.faults.forked import become, matrix
from tests.helpers import wait_until

SECONDS = 300  # for a whole job


@dataclass(frozen=True)
class Job:
    """How a job ended: the first failing rank's code (128 + N for signal N, 0 if none failed), and what ranks wrote."""

    code: int
    codes: list[int]
    stdout: list[str]
    stderr: list[str]

    def errors(self):
        """The lines on stderr of all ranks that are not about progress."""
        kinds = ("error: ", "interrupted", "resume with: ", "Traceback")
        return [line for text in self.stderr for line in text.splitlines() if line.startswith(kinds)]


def run_job(bodies, folder):
    """Runs one rank per body."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so that no child waits for threads that the fork left behind
    reader, writer = os.pipe()
    pids = [_fork(body, rank, len(bodies), reader, folder) for rank, body in enumerate(bodies)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in pids:
        os.write(writer, f"{store.port:5}".encode())
    os.close(reader)
    os.close(writer)
    codes: dict[int, int] = {}
    first, deadline = 0, time.monotonic() + SECONDS
    try:
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
            time.sleep(0.01)
    finally:
        for rank in set(range(len(pids))) - set(codes):
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
    texts = [[(folder / f"{rank}.{name}").read_text() for rank in range(len(bodies))] for name in ("out", "err")]
    return Job(first, [codes[rank] for rank in range(len(bodies))], *texts)


def _fork(body, rank, size, reader, folder):
    pid = os.fork()
    if pid == 0:
        port = os.read(reader, 5).decode().strip()
        os.environ |= {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        become(body, folder / f"{rank}.out", folder / f"{rank}.err")
    return pid


def sharded(small, out, size, *more, before=lambda rank: None, given=None):
    """The matrix over `size` ranks. before(rank) runs in each first; given: arguments of one rank alone."""
    arguments = [small.arguments(out, *more, *(given or {}).get(rank, [])) for rank in range(size)]
    bodies = [matrix(words, lambda rank=rank: before(rank)) for rank, words in enumerate(arguments)]
    return run_job(bodies, out.with_name(f"{out.name}-said"))


def require_same(out, alone):
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name
    assert not (out / "partial").exists(), "all of it stands in rows.jsonl"


def there(out):
    """The rows on disk, wherever."""
    files = [*out.glob("partial/rows-*.jsonl"), *out.glob("rows.jsonl")]
    complete = [line for path in files for line in path.read_text().rpartition("\n")[0].splitlines()]
    return {json.loads(line)["row"] for line in complete}


def die_at(out, rows):
    """SIGKILL for this rank, once so many rows are on disk."""
    wait_until(lambda: len(there(out)) >= rows)
    os.kill(os.getpid(), signal.SIGKILL)


def forbid():
    raise AssertionError("a row is decoded again")
