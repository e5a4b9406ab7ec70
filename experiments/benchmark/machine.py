"""The machine under the figures: what it is, how busy it was, and how fast it reads memory."""

import os
from collections.abc import Callable
from typing import Any

import torch

from experiments.benchmark.timing import Stopwatch
from experiments.run.manifest import git_state
from minimodel.machine import cpu_model, machine_record
from minimodel.numerics import NumericContract


def machine(numeric: NumericContract) -> dict[str, Any]:
    """Processor, cores, threads, versions and commit: what stands beside every figure."""
    numeric.apply()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numeric": numeric.record(),
        "environment": machine_record(),
        **git_state(),
    }


def load() -> float:
    """Processes that ran or waited, averaged over the last minute; other people's work shows here."""
    return round(os.getloadavg()[0], 2)


class StreamingRead:
    """One pass over a large buffer: the bytes-over-bandwidth limit's bandwidth. A sample is seconds a byte.

    Several reductions read it; the fastest one on this machine is the one that is measured, as the slower ones are
    bound by their sums.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """size: bytes of the buffer, a multiple of 8; it should be far beyond what a cache holds."""
        buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        left, right = buffer.chunk(2)
        ways: dict[str, Callable[[], Any]] = {
            "sum of float32": buffer.sum,
            "sum of int64": buffer.view(torch.int64).sum,
            "dot product of float32": lambda: torch.dot(left, right),
        }
        self._device, self._size = device, size
        tried = {way: min(self._seconds(ways[way]) for _ in range(3)) for way in ways}
        self.way = min(tried, key=lambda way: tried[way])
        self._read = ways[self.way]

    def __call__(self) -> float:
        return self._seconds(self._read) / self._size

    def _seconds(self, read: Callable[[], Any]) -> float:
        watch = Stopwatch(self._device)
        with watch:
            read()
        return watch.seconds
