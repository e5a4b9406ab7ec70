"""Arms take turns, and figures are medians, quartiles and ratios of one round; how fast memory is read."""

import torch

from experiments.run.costs import StreamingRead, interleaved, ratios, spread


def test_rounds_take_turns_and_warm_up_does_not_count():
    order: list[str] = []

    def arm(name):
        order.append(name)
        return float(len(order))

    found = interleaved({name: lambda name=name: arm(name) for name in "abc"}, repeats=2, warm_up=1)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}


def test_spread_and_ratios():
    assert spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "n": 5}
    assert spread([2.0]) == {"median": 2.0, "quartiles": [2.0, 2.0], "n": 1}
    # a machine twice as slow in the second round moves the figures, not the ratio
    assert ratios([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == {"median": 2.0, "quartiles": [2.0, 2.0], "n": 3}


def test_streaming_read_takes_time_in_proportion():
    small, large = (StreamingRead(torch.device("cpu"), size) for size in (1 << 20, 1 << 26))
    seconds = [min(read() for _ in range(5)) * size for read, size in ((small, 1 << 20), (large, 1 << 26))]
    assert 0 < seconds[0] < seconds[1]
