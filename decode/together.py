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
from minimodel.decoder import Cache, Decoder, Observe, Record, noting
from minimodel.linear import OneByOne, Plain
from minimodel.packed import PackedMap, PackedMaps
from minimodel.roles import check_ids, check_mask


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
    last = check_ids("position_ids", position_ids, model.config.max_position_embeddings)

    def attend(index: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        new = zip(keys.split(COPIES), values.split(COPIES), strict=True)
        held = [request.cache.append(index, *pair) for request, pair in zip(requests, new)]
        masks[:] = [None if mask is None else mask.to(query.device) for mask in masks]
        if model.attend_several is not None:
            return model.attend_several(query, held, masks, model.scaling)
        calls = zip(query.split(COPIES), held, masks)
        return torch.cat([model.attend(own, *pair, mask, model.scaling) for own, pair, mask in calls])  # [2K, 1, H, D]

    note = noting(observe)
    hidden_states = note("embed", model.embed(input_ids, torch.cat(roles) if roles else None))  # [2K, 1, E]
    cos, signed_sin = model.rotary.at(position_ids, 1 + max(last, *(len(request.cache) for request in requests)))
    return model.through_layers(hidden_states, cos, signed_sin, attend, note)


class Pairs(Plain):
    """F.linear of each pair of rows, [2K, 1, in] -> [2K, 1, out], as one batched product of K pairs.

    MKL sums two FP32 rows in another order than four and more. A batch of products of two rows mostly has the order of
    two, which `decode.independence` checks by shape.
    """

    def __call__(self, x: Tensor) -> Tensor:
        pairs = x.reshape(-1, COPIES, x.shape[-1])  # [K, 2, in]
        weight, bias = self.weight.t().expand(len(pairs), -1, -1), self.bias  # [K, in, out]
        out = torch.bmm(pairs, weight) if bias is None else torch.baddbmm(bias.expand(len(pairs), 2, -1), pairs, weight)
        return out.view(*x.shape[:-1], -1)


class OneCallEach(Plain):
    """F.linear of each pair of rows in a separate call: the bits of two rows where no other way has them."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(pair.clone(), self.weight, self.bias) for pair in x.split(COPIES)])


Shape = tuple[object, ...]  # outputs of each map, in, whether there is a bias
Way = type[Plain] | type[PackedMaps]  # PackedMaps: the packed call at every row count


def shape_of(linear: Plain | PackedMaps) -> Shape:
    """Returns what decides how a map takes the rows of several requests."""
    if isinstance(linear, Plain):
        return (*linear.weight.shape, linear.bias is not None)
    return linear.widths, linear.run.packed.shape[1], linear.run.bias is not None


def taking(model: Decoder, ways: Mapping[Shape, Way], several: SeveralAttention | None = None) -> Decoder:
    """Returns a decoder over the same weights whose maps take the rows of several requests by their shapes.

    several: the kernel that attends for all requests in one call, None for a call each.
    """

    def taken(linear: Any) -> Any:
        if isinstance(linear, OneByOne):
            return OneByOne([taken(each) for each in linear.maps])
        if isinstance(linear, PackedMap):
            return PackedMap(taken(linear.maps))
        if isinstance(linear, PackedMaps) and shape_of(linear) in ways:
            return replace(linear, counts=None)
        if isinstance(linear, Plain):
            way: Any = ways.get(shape_of(linear), Plain)
            return way(linear.weight, linear.bias)
        return linear

    other = copy.copy(model)
    other.attend_several, other.lm_head = several, taken(model.lm_head)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    other.layers = tuple(
        replace(layer, **{name: taken(getattr(layer, name)) for name in names}) for layer in model.layers
    )
    return other
