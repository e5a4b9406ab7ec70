"""Digests of tensors: SHA-256 over dtype, shape and raw bytes, independent of the layout in memory."""

import hashlib

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
    """Returns the hash of the dtype, the shape and the bytes in row-major order."""
    header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:"
    digest = hashlib.sha256(header.encode("ascii"))
    whole = bits(tensor.detach()).cpu()
    # a K/V view [B, H_kv, n, D] of a larger capacity is hashed head by head: each is contiguous, so nothing is copied
    for piece in whole.flatten(0, 1) if whole.ndim > 2 and not whole.is_contiguous() else [whole]:
        digest.update(piece.contiguous().numpy().data)
    return digest
