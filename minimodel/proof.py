"""Proofs, by trial on the device at hand, that a function of rows gives each row the same bits in any company.

A library chooses the order of its sums by shape, thread count and sometimes by the row's place, never by the numbers.
So a few hundred random rows, each an order's fingerprint of many outputs, show every difference of order there is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minimodel.numbers import same_bits

Rows = Callable[[Tensor], Tensor]  # [n, in] -> [n, out], row by row


def thread_counts() -> tuple[int, ...]:
    """The counts under which a proof must hold: one, two, and the one in force."""
    return tuple(sorted({1, 2, torch.get_num_threads()}))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """`count` threads inside, the caller's count again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_rows(count: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """[count, width] normal values from a generator of their own."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def in_tiles(function: Rows, x: Tensor, tile: int) -> Tensor:
    """function over x [n, in] in calls of exactly `tile` rows, the last padded with zero rows: [n, out]."""
    parts = []
    for start in range(0, x.shape[0], tile):
        part = x[start : start + tile]
        padded = part.new_zeros(tile, part.shape[1])
        padded[: part.shape[0]] = part
        parts.append(function(padded)[: part.shape[0]])
    return torch.cat(parts)


def place_does_not_matter(function: Rows, x: Tensor, tile: int) -> bool:
    """Within calls of `tile` rows, no row's bits depend on its place, on its neighbours or on the thread count."""
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1)).to(x.device)
    with threads(1):
        expected = in_tiles(function, x, tile)
    for count in thread_counts():
        with threads(count):
            if not same_bits(in_tiles(function, x, tile), expected):
                return False
            if not same_bits(in_tiles(function, x[order], tile), expected[order]):
                return False
            if not same_bits(in_tiles(function, x[: tile // 2 + 1], tile), expected[: tile // 2 + 1]):
                return False
    return True


def sizes_like(function: Rows, x: Tensor, tile: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `sizes` whose calls give every row the bits of calls of `tile` rows; `tile` itself is always one."""
    with threads(1):
        expected = in_tiles(function, x, tile)
    good = {tile}
    for size in sizes:
        if size <= x.shape[0] and size != tile and _all_equal(function, x, size, expected):
            good.add(size)
    return tuple(sorted(good))


def _all_equal(function: Rows, x: Tensor, size: int, expected: Tensor) -> bool:
    for count in thread_counts():
        with threads(count):
            if not same_bits(in_tiles(function, x, size), expected):
                return False
    return place_does_not_matter(function, x, size)
