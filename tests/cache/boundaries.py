"""Two boundaries, bit for bit."""

from cache import Boundary
from minimodel.bits import same_bits


def equal(left: Boundary, right: Boundary) -> bool:
    return left.cache.equals(right.cache) and same_bits(left.logits, right.logits)
