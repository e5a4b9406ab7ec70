"""Storage isolation: whether a write to one group of tensors could reach another."""

from collections.abc import Iterable

from torch import Tensor

from cache.kv import KVCache


def memory_ranges(tensors: Iterable[Tensor]) -> list[tuple[str, int, int]]:
    """Returns (device, first byte, one past the last byte) of each tensor's whole storage, not of its view."""
    ranges = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            ranges.append((str(tensor.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return ranges


def disjoint(*groups: Iterable[Tensor]) -> bool:
    """Returns whether no two groups share a byte of storage; aliasing within a group is allowed."""
    marked = sorted((*span, index) for index, group in enumerate(groups) for span in memory_ranges(group))
    reach: tuple[str, int, int] | None = None  # of the spans so far, the one that ends last: device, stop, group
    for device, start, stop, group in marked:
        if reach is not None and reach[0] == device and start < reach[1] and group != reach[2]:
            return False
        if reach is None or reach[0] != device or stop > reach[1]:
            reach = (device, stop, group)
    return True


def cache_tensors(cache: KVCache) -> list[Tensor]:
    """Returns the key and value views of a cache, in forward order."""
    return [tensor for _, _, tensor in cache.tensors()]


def geometry(tensor: Tensor) -> dict[str, object]:
    """Returns shape, stride, dtype, device, and whether it is an inference tensor: what equal bits do not show."""
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "inference": tensor.is_inference(),
    }
