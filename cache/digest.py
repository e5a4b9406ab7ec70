"""Digests of tensors: SHA-256 over dtype, shape and raw bytes, so that different tensors never share one by layout.

A cache of gigabytes is hashed where it lies, several tensors at a time: hashlib lets other threads run. What lies on an
accelerator passes through a few pinned buffers, so that one tensor is copied while others are hashed, and the cache
never has a second copy.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import bits

WORKERS = 4  # threads that hash, no more than this process has cores
SMALL = 1 << 22  # bytes below which starting threads costs more than it saves


def tensor_sha256(tensor: Tensor) -> str:
    """Hex digest of one tensor's dtype, shape and bytes in row-major order."""
    return _hash(tensor).hexdigest()


def cache_sha256(cache: KVCache) -> str:
    """Hex digest over the digests of all tensors, keys before values, layer by layer."""
    outer = hashlib.sha256(f"cache:{cache.layers}:".encode("ascii"))
    for digest in _digests([tensor for _, _, tensor in cache.tensors()]):
        outer.update(digest)
    return outer.hexdigest()


def _digests(tensors: list[Tensor]) -> Iterator[bytes]:
    """The digest of each, in order; plainly, or on several threads where that is worth it."""
    workers = min(WORKERS, len(tensors), cores())
    if sum(tensor.nbytes for tensor in tensors) < SMALL or workers < 2:
        yield from (_hash(tensor).digest() for tensor in tensors)
        return
    with ThreadPoolExecutor(workers) as pool:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            yield from pool.map(lambda tensor: _hash(tensor).digest(), tensors)
        else:
            yield from _staged(pool, tensors, workers + 1)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _staged(pool: ThreadPoolExecutor, tensors: list[Tensor], buffers: int) -> list[bytes]:
    """Copies tensor after tensor to one of so many host buffers, each hashed while the next ones are copied."""
    pinned = torch.cuda.is_available()
    largest = max(tensor.nbytes for tensor in tensors)
    free: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(buffers):
        free.put(torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=pinned))
    futures = []
    for tensor in tensors:
        stage = free.get()  # waits until a worker gives one back
        host = stage[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=pinned)
        copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None
        futures.append(pool.submit(_hash_stage, host, stage, copied, free))
    return [future.result() for future in futures]


def _hash_stage(host: Tensor, stage: Tensor, copied: "torch.cuda.Event | None", free: "SimpleQueue[Tensor]") -> bytes:
    try:
        if copied is not None:
            copied.synchronize()
        return _hash(host).digest()
    finally:
        free.put(stage)


def _hash(tensor: Tensor) -> "hashlib._Hash":
    header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:"
    digest = hashlib.sha256(header.encode("ascii"))
    for piece in _pieces(bits(tensor.detach()).cpu()):
        digest.update(piece.numpy().data)
    return digest


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """Contiguous parts that are the tensor's row-major bytes; of K/V [B, H_kv, n, D] with room behind, one a head."""
    if tensor.is_contiguous():
        yield tensor
    elif tensor.ndim > 2:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield tensor.contiguous()
