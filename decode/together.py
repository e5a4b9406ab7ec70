"""One decode step of several requests: row-wise parts run once on the rows of all requests, attention once per request
on that request's own cache, or once for all where the kernel's rows are independent.

A request keeps the bits it has alone exactly where every row-wise part gives a pair of rows (a request's two physical
copies) the same bits in any call. `decode.independence` checks that on the device before requests step together.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import SeveralAttention
from minimodel.bits import COPIES
from minimodel.decoder import Cache, Decoder, Observe, Record
from minimodel.linear import Plain
from minimodel.packed import Packed
from minimodel.roles import check_mask


@dataclass(frozen=True)
class Request:
    """One request's part of a step: the arguments of a decoder call of one token."""

    input_ids: Tensor  # int64 [2, 1]
    roles: Tensor | None  # int64 [2, 1]
    position_ids: Tensor  # int64 [2, 1]
    mask: Tensor | None  # bool [2, 1, 1, S]; None: every key may be seen
    cache: Cache  # of S - 1 tokens
    record: Record | None = None


def step_together(model: Decoder, requests: Sequence[Request], observe: Observe | None = None) -> Tensor:
    """Runs one token of each of K requests and returns the hidden states [2K, 1, E], two rows per request in order.

    Each cache then holds one token more. Errors as in a decoder call. `observe` gets the rows of all requests.
    """
    for request in requests:
        if request.record is not None:
            request.record(request.input_ids, request.roles, request.position_ids, request.mask)
        check_mask(request.mask, COPIES, 1, len(request.cache) + 1)
    input_ids = torch.cat([request.input_ids for request in requests])  # [2K, 1]
    position_ids = torch.cat([request.position_ids for request in requests])  # [2K, 1]
    roles = [request.roles for request in requests if request.roles is not None]
    masks = [request.mask for request in requests]
    key_length = 1 + max(len(request.cache) for request in requests)

    def attend(layer: int, query_states: Tensor, key_states: Tensor, value_states: Tensor) -> Tensor:
        new = zip(key_states.split(COPIES), value_states.split(COPIES), strict=True)
        held = [request.cache.append(layer, *pair) for request, pair in zip(requests, new)]
        masks[:] = [None if mask is None else mask.to(query_states.device) for mask in masks]
        if model.attend_several is not None:
            return model.attend_several(query_states, held, masks, model.scaling)
        calls = zip(query_states.split(COPIES), held, masks)
        return torch.cat([model.attend(own, *pair, mask, model.scaling) for own, pair, mask in calls])  # [2K, 1, H, D]

    return model.forward(input_ids, torch.cat(roles) if roles else None, position_ids, key_length, attend, observe)


class Pairs(Plain):
    """F.linear of each pair of rows, [2K, 1, in] -> [2K, 1, out], as one batched product of K pairs.

    MKL sums two FP32 rows in another order than four and more. A batch of products of two rows mostly has the order of
    two, which `decode.independence` checks by shape.
    """

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        pairs, outs = x.reshape(-1, COPIES, x.shape[-1]), []  # [K, 2, in]
        for weight, bias in self.parts:
            wide = weight.t().expand(len(pairs), -1, -1)  # [K, in, out]
            out = torch.bmm(pairs, wide) if bias is None else torch.baddbmm(bias.expand(len(pairs), 2, -1), pairs, wide)
            outs.append(out.view(*x.shape[:-1], -1))
        return outs


class OneCallEach(Plain):
    """F.linear of each pair of rows in a separate call: the bits of two rows where no other way has them."""

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        pairs = [pair.clone() for pair in x.split(COPIES)]
        return [torch.cat([F.linear(pair, weight, bias) for pair in pairs]) for weight, bias in self.parts]


Shape = tuple[object, ...]  # outputs of each map, in, whether there is a bias
Way = type[Plain] | type[Packed]  # Packed: the packed call at every row count


def shape_of(maps: Plain | Packed) -> Shape:
    """Returns what decides how maps take the rows of several requests."""
    if isinstance(maps, Packed):
        return maps.widths, maps.run.packed.shape[1], maps.run.bias is not None
    return tuple(len(weight) for weight, _ in maps.parts), maps.parts[0][0].shape[1], maps.parts[0][1] is not None


def taking(model: Decoder, ways: Mapping[Shape, Way], several: SeveralAttention | None = None) -> Decoder:
    """Returns a decoder over the same weights whose maps take the rows of several requests by their shapes.

    several: the kernel that attends for all requests in one call, None for a call each.
    """

    def taken(maps: Any) -> Any:
        way: Any = ways.get(shape_of(maps)) if isinstance(maps, (Plain, Packed)) else None
        if way is None:
            return maps
        return replace(maps, counts=None) if isinstance(maps, Packed) else way(maps.parts)

    other = copy.copy(model)
    other.attend_several, other.lm_head = several, taken(model.lm_head)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    other.layers = tuple(
        replace(layer, **{name: taken(getattr(layer, name)) for name in names}) for layer in model.layers
    )
    return other
