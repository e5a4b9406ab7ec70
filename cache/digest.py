"""Digests of tensors: SHA-256 over dtype, shape and raw bytes, so that different tensors never share one by layout."""

import hashlib

from torch import Tensor

from cache.kv import KVCache
from minimodel.numbers import bits


def tensor_sha256(tensor: Tensor) -> str:
    """Hex digest of one tensor's dtype, shape and bytes in row-major order."""
    return _hash(tensor).hexdigest()


def cache_sha256(cache: KVCache) -> str:
    """Hex digest over the digests of all tensors, keys before values, layer by layer."""
    outer = hashlib.sha256(f"cache:{cache.layers}:".encode("ascii"))
    for _, _, tensor in cache.tensors():
        outer.update(_hash(tensor).digest())
    return outer.hexdigest()


def _hash(tensor: Tensor) -> "hashlib._Hash":
    header = f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:"
    digest = hashlib.sha256(header.encode("ascii"))
    digest.update(bits(tensor.detach().contiguous()).cpu().numpy().data)
    return digest
