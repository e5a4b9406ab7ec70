"""One decode step of several requests: row-wise parts run once on the rows of all requests, attention once per request
on that request's own cache.

A request keeps the bits it has alone exactly where every row-wise part gives a pair of rows (a request's two physical
copies) the same bits in any call. `decode.independence` checks that on the device before requests step together.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import COPIES
from minimodel.decoder import Cache, Decoder, Observe, Record, unobserved
from minimodel.linear import Joint, Linear, Plain
from minimodel.packed import OneByOne
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
    note = observe or unobserved
    input_ids = torch.cat([request.input_ids for request in requests])
    position_ids = torch.cat([request.position_ids for request in requests])
    roles = [request.roles for request in requests if request.roles is not None]
    last = check_ids("position_ids", position_ids, model.config.max_position_embeddings)
    hidden_states = model.embed(input_ids, torch.cat(roles) if roles else None)
    note("embed", hidden_states)
    masks = [request.mask for request in requests]

    def attend(index: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = []
        parts = zip(query.split(COPIES), keys.split(COPIES), values.split(COPIES), strict=True)
        for number, (own, new_keys, new_values) in enumerate(parts):
            mask = masks[number] = None if (mask := masks[number]) is None else mask.to(query.device)
            held = requests[number].cache.append(index, new_keys, new_values)
            found.append(model.attend(own, *held, mask, model.scaling))
        return torch.cat(found)

    cos, signed_sin = model.rotary.at(position_ids, 1 + max(last, *(len(request.cache) for request in requests)))
    return model.through_layers(hidden_states, cos, signed_sin, attend, note)


@dataclass(frozen=True)
class Pairs:
    """F.linear of each pair of rows, [2K, 1, in] -> [2K, 1, out], as one batched product of K pairs.

    MKL sums two FP32 rows in another order than four and more. A batch of products of two rows mostly has the order of
    two, which `decode.independence` checks by shape.
    """

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        pairs = x.reshape(-1, COPIES, x.shape[-1])
        weight, bias = self.weight.t().expand(len(pairs), -1, -1), self.bias
        out = torch.bmm(pairs, weight) if bias is None else torch.baddbmm(bias.expand(len(pairs), 2, -1), pairs, weight)
        return out.view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class OneCallEach:
    """F.linear of each pair of rows in a call of its own: the bits of two rows wherever no other way has them."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(pair.clone(), self.weight, self.bias) for pair in x.split(COPIES)])


Way = type[Plain] | type[Pairs] | type[OneCallEach]
Shape = tuple[int, int, bool]  # out, in, whether there is a bias


def shape_of(linear: Plain) -> Shape:
    return (*linear.weight.shape, linear.bias is not None)


def taking(model: Decoder, ways: Mapping[Shape, Way]) -> Decoder:
    """Returns a decoder over the same weights whose `Plain` maps take the rows of several requests by their shapes."""
    if not ways:
        return model

    def taken(linear: Linear) -> Linear:
        return ways.get(shape_of(linear), Plain)(linear.weight, linear.bias) if isinstance(linear, Plain) else linear

    def joint(maps: Joint) -> Joint:
        return OneByOne([taken(linear) for linear in maps.maps]) if isinstance(maps, OneByOne) else maps

    other = copy.copy(model)
    other.lm_head = taken(model.lm_head)
    other.layers = tuple(
        replace(
            layer,
            qkv_proj=joint(layer.qkv_proj),
            o_proj=taken(layer.o_proj),
            gate_up_proj=joint(layer.gate_up_proj),
            down_proj=taken(layer.down_proj),
        )
        for layer in model.layers
    )
    return other
