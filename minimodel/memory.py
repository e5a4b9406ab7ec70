"""Memory of large blocks while a checkpoint loads."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
APART, CEILING = 1 << 20, 32 << 20


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Inside, glibc gives each block from 1 MiB on pages of its own, which the system has back once it is freed.

    A kernel that packs its weights frees each plain one. glibc answers the first such free by keeping later blocks of
    that size in its heap, where holes stay: 130 MB of them after packing a 0.5B checkpoint. Afterwards the limits are
    glibc's own ceilings, so that the blocks of a forward pass are reused. Where there is no glibc nothing is changed;
    no bit depends on where a block lies.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, CEILING)
        mallopt(M_TRIM_THRESHOLD, 2 * CEILING)
