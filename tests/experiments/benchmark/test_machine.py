"""How fast the machine reads memory."""

import torch

from experiments.benchmark.machine import StreamingRead


def test_streaming_read_takes_time_in_proportion() -> None:
    small, large = (StreamingRead(torch.device("cpu"), size) for size in (1 << 20, 1 << 26))
    seconds = [min(read() for _ in range(5)) * size for read, size in ((small, 1 << 20), (large, 1 << 26))]
    assert 0 < seconds[0] < seconds[1]
