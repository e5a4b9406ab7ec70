"""Digests of tensors: SHA-256 over dtype, shape and raw bytes, whatever the layout in memory."""

import hashlib
from collections.abc import Iterable

from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import bits


def tensor_sha256(tensor: Tensor) -> str:
    """Returns the hex digest of one tensor's dtype, shape and bytes in row-major order."""
    return _hash(tensor).hexdigest()


def cache_sha256(cache: KVCache) -> str:
    """Returns the hex digest over the digests of all tensors, keys before values, layer by layer."""
    outer = hashlib.sha256(f"cache:{cache.layers}:".encode("ascii"))
    for _, _, tensor in cache.tensors():
        outer.update(_hash(tensor).digest())
    return outer.hexdigest()


def _hash(tensor: Tensor) -> "hashlib._Hash":
    header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:"
    digest = hashlib.sha256(header.encode("ascii"))
    for piece in _pieces(bits(tensor.detach()).cpu()):
        digest.update(piece.numpy().data)
    return digest


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """Yields contiguous parts, together the row-major bytes: of K/V [B, H_kv, n, D] with room behind, one per head."""
    if tensor.is_contiguous():
        yield tensor
    elif tensor.ndim > 2:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield tensor.contiguous()
