"""Checks on samples that on this device a function of rows gives each row the same bits whatever the other rows.

A library chooses the order of its sums by shape, by thread count and sometimes by a row's place, never by the values.
With ordinary values most differences in order disappear when the result is rounded to 8 or 11 bits. So the checks use
sums whose exact value is 0: the result is the rounding error itself, which differs between orders.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minimodel.bits import same_bits

Rows = Callable[[Tensor], Tensor]  # [n, in] -> [n, out], row by row
LARGE = 1 << 24  # elements; of a weight with more no second one is made for a check


def thread_counts() -> tuple[int, ...]:
    """Returns the thread counts under which a check must hold: one, two, and the one in force."""
    return tuple(sorted({1, 2, torch.get_num_threads()}))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets `count` threads inside the block and the caller's count afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cancelling(
    rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns x [rows, width] and weight [out, width]: each exact product x . w is 0, its terms about 2^-16 to 2^16.

    Columns form random pairs, equal in x and opposite in the weight. A column left over is zero in both.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(width, generator=generator, device="cpu")
    first, second = order[: width // 2], order[width // 2 : width // 2 * 2]
    x, weight = (torch.zeros(count, width, dtype=torch.float32, device="cpu") for count in (rows, out))
    scale = torch.randint(-8, 9, (rows, len(first)), generator=generator, device="cpu")
    x[:, first] = torch.randn(rows, len(first), generator=generator, dtype=torch.float32, device="cpu") * 2.0**scale
    weight[:, first] = torch.randn(out, len(first), generator=generator, dtype=torch.float32, device="cpu")
    x, weight = x.to(dtype), weight.to(dtype)
    x[:, second], weight[:, second] = x[:, first], -weight[:, first]
    return x.to(device), weight.to(device)


def trial(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what a check of this weight's shape runs on: x [rows, in], a weight, and zeros for a bias.

    For a large weight that is the weight itself, so that no second one is made: it has so many outputs that some of
    them show a difference even where the sums do not cancel.
    """
    large = weight.numel() > LARGE
    x, made = cancelling(rows, weight.shape[1], 2 if large else weight.shape[0], weight.dtype, weight.device)
    return x, weight.detach() if large else made, None if bias is None else torch.zeros_like(bias)


def in_tiles(function: Rows, x: Tensor, tile: int) -> Tensor:
    """Returns function over x [n, in], n a multiple of `tile`, in calls of exactly `tile` rows: [n, out]."""
    return torch.cat([function(x[start : start + tile]) for start in range(0, x.shape[0], tile)])


def place_does_not_matter(function: Rows, x: Tensor, tile: int, expected: Tensor) -> bool:
    """Returns whether in calls of `tile` rows each row of x has `expected`'s bits at every place tried.

    x [n, in], expected [n, out]. Per thread count it tries three calls: the first rows of x in order, a random choice
    of rows, and two thirds of that choice, rotated and padded with zero rows.
    """
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1), device="cpu")[:tile].to(x.device)
    turned = order.roll(tile // 2 + 1)[: -(-tile * 2 // 3)]
    padded = x.new_zeros(tile, x.shape[1])  # [tile, in]
    padded[: len(turned)] = x[turned]
    for count in thread_counts():
        with threads(count):
            if not (
                same_bits(function(x[:tile]), expected[:tile])
                and same_bits(function(x[order]), expected[order])
                and same_bits(function(padded)[: len(turned)], expected[turned])
            ):
                return False
    return True
