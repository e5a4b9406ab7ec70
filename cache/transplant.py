"""Transplants: a copy of a recipient's boundary with keys and values of a donor."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from cache.boundary import Boundary
from cache.isolation import cache_tensors, disjoint
from minimodel.bits import RowFailure, same_bits
from minimodel.errors import InputError, refuse

TENSORS = {"kv": ("key", "value"), "k": ("key",), "v": ("value",)}


@torch.inference_mode()
def transplant(
    recipient: Boundary,
    donor: Boundary,
    layers: Iterable[int] | None = None,
    tensors: str = "kv",
    positions: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> Boundary:
    """Returns a copy of the recipient with the donor's keys, values or both at the given places (default: everywhere).

    layers, positions, heads: indices of decoder layers, token slots, key/value heads; None means all. tensors: "kv",
    "k" or "v". State, functional record and boundary logits remain the recipient's (paper, section 3.6). InputError
    unless both hold the same prefix in tensors of the same shape, stride and dtype. RowFailure unless both have the
    same functional record.
    """
    if tensors not in TENSORS:
        raise refuse("transplant tensors", "kv, k or v", tensors)
    _require_same_geometry(recipient, donor)
    cache = recipient.cache.copy()
    chosen_layers = _indices(layers, cache.layers, "layers")
    slots = torch.tensor(sorted(_indices(positions, len(cache), "positions")), dtype=torch.int64, device="cpu")
    heads_held = cache.keys(0).shape[1]
    rows = torch.tensor(sorted(_indices(heads, heads_held, "heads")), dtype=torch.int64, device="cpu")
    for (layer, name, target), (_, _, source) in zip(cache.tensors(), donor.cache.tensors()):
        if layer in chosen_layers and name in TENSORS[tensors]:
            if positions is None and heads is None:
                target.copy_(source)
            else:
                at = (slice(None), rows[:, None].to(target.device), slots[None, :].to(target.device))
                target[at] = source[at]  # [B, chosen heads, chosen slots, D]
    cache.require_equal_copies()
    return replace(
        recipient,
        rebuild=None,
        construction=f"{donor.construction}_cache_into_{recipient.construction}",
        cache=cache,
        logits=recipient.logits.clone(),
        record=recipient.record.copy(),
    )


def whole_transplant_holds(result: Boundary, recipient: Boundary, donor: Boundary) -> bool:
    """Returns whether a whole-cache transplant is right.

    Every K/V tensor must have the donor's bits, shape, stride and dtype. Logits and functional record must be
    the recipient's. The three boundaries must share no storage.
    """
    strides = [[tensor.stride() for tensor in cache_tensors(one.cache)] for one in (result, donor)]
    provenance = result.cache.equals(donor.cache) and strides[0] == strides[1]
    kept = same_bits(result.logits, recipient.logits) and result.record.sha256() == recipient.record.sha256()
    isolated = disjoint(result.tensors(), recipient.tensors(), donor.tensors())
    return provenance and kept and isolated


def _indices(chosen: Iterable[int] | None, count: int, name: str) -> set[int]:
    """Returns the chosen indices of 0 to count - 1, all of them for None. InputError for any other."""
    if chosen is None:
        return set(range(count))
    found = set(chosen)
    for index in found:
        if type(index) is not int or not 0 <= index < count:
            raise refuse(f"transplant {name}", f"indices from 0 to {count - 1}", index)
    return found


def _require_same_geometry(recipient: Boundary, donor: Boundary) -> None:
    if recipient.state.tokens != donor.state.tokens:
        raise InputError("transplant: expected donor and recipient of one prefix, found two")
    if recipient.record.sha256() != donor.record.sha256():
        raise RowFailure("transplant: expected one functional state, found other roles, positions or mask rows entered")
    layers = recipient.cache.layers, donor.cache.layers
    if layers[0] != layers[1]:
        raise InputError(f"transplant: expected equal layer counts, found {layers[0]} and {layers[1]}")
    for (layer, name, mine), (_, _, theirs) in zip(recipient.cache.tensors(), donor.cache.tensors()):
        one, two = ((list(tensor.shape), tensor.stride(), tensor.dtype) for tensor in (mine, theirs))
        if one != two:
            found = " and ".join(" ".join(map(str, kind)) for kind in (one, two))
            raise InputError(f"transplant layer {layer} {name}: expected equal shape, stride and dtype, found {found}")
