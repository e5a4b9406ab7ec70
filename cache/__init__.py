"""The K/V cache: storage, the three constructions of a boundary, transplants, comparison and isolation."""

from cache.boundary import Boundary
from cache.build import build_incremental, build_live, build_prefill
from cache.drift import compare
from cache.kv import KVCache
from cache.transplant import transplant

__all__ = ["Boundary", "KVCache", "build_incremental", "build_live", "build_prefill", "compare", "transplant"]
