"""Finds how many requests may step together on this machine: as many as keep, each, the bits they have alone.

A request brings two rows (its two copies) to a step, and a library picks the order of its sums by the number of rows.
So each part of a decode step is tried with the rows of 2, 3, ... requests and compared with calls of two rows: every
projection by its shape, on sums that cancel (`minimodel.invariant.checks`); norm, activation and rotation; and the
model's first layer with attention over caches of different lengths. The result is a property of shapes, dtype, kernels
and threads, not of the values in a weight.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from timeit import repeat

import torch
from torch import Tensor

from decode.together import OneCallEach, Pairs, Request, Shape, Way, shape_of, step_together, taking
from minimodel.attention import ATTENTION_KERNELS, SEVERAL_KERNELS, SeveralAttention
from minimodel.bits import COPIES, same_bits
from minimodel.decoder import Decoder
from minimodel.invariant.attention import KEY_BLOCK
from minimodel.invariant.checks import LARGE, Rows, cancelling
from minimodel.layers import apply_rotary_pos_emb, rms_norm
from minimodel.linear import LINEAR_KERNELS, Plain, Projections
from minimodel.packed import Packed
from minimodel.roles import NUM_ROLES
from minimodel.selfcheck import one_layer, random_kv

LARGEST = 16  # requests tried by default
HEAD = "lm_head"
FEW_TOKENS = 64  # vocabulary of the trial layer where the head is too large to be made twice


@dataclass(frozen=True)
class Together:
    """The most requests that may step together, and the decoder that does it."""

    size: int  # requests; 1 where no two may
    model: Decoder  # for `step_together`: the same weights, each projection in the `Way` that keeps a request's bits
    limit: str  # the part that fails with one request more, and its rows; empty where all that were tried pass


# size and limit as in `Together`; ways of projections by shape; the kernel that attends for all requests in one call
Measured = tuple[int, dict[Shape, Way], SeveralAttention | None, str]
_KNOWN: dict[object, Measured] = {}  # checks made


@torch.inference_mode()
def together_here(model: Decoder, most: int = LARGEST) -> Together:
    """Returns the largest number of requests up to `most` whose common step gives each of them the bits it has alone.

    Puts the model's numeric contract in force. A projection whose rows do not keep their bits in one call is computed
    in another way (see `_way`). Attention is one call for all requests where the kernel has one and the layer passes.
    """
    model.numeric.apply()
    numeric = model.numeric
    kernels = LINEAR_KERNELS[numeric.linear], ATTENTION_KERNELS[numeric.attention]
    key = (numeric, model.config, model.role_embedding is None, most, *kernels)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(model, most)
    size, ways, several, limit = _KNOWN[key]
    return Together(size, taking(model, ways, several), limit)


def _measured(model: Decoder, most: int) -> Measured:
    """Tries every part of a step; each may lower the size that the parts before it left."""
    trial = _trial_layer(model)
    known = [run for run, _ in _projections(model, trial).values() if isinstance(run, (Plain, Packed))]
    ways = {shape_of(run): way for run in known if (way := _way(run, most))}
    size, limit = most, ""
    for name, function, x in _parts(taking(model, ways), taking(trial, ways), most):
        found = row_counts_equal(function, x[: COPIES * size])
        if found < size:
            size, limit = found, f"{name}, {COPIES * (found + 1)} rows"
    several = SEVERAL_KERNELS.get(model.numeric.attention)
    found = _layer_size(taking(model, ways, several), size)
    if several is not None and found < size:  # then a call for each request
        several, found = None, _layer_size(taking(model, ways), size)
    if found < size:
        size, limit = found, f"one whole layer, {COPIES * (found + 1)} rows"
    return size, ways, several, limit


def row_counts_equal(function: Rows, x: Tensor) -> int:
    """Returns the largest K from 1 to N such that every call of 2, 3, ..., K pairs of rows of x [2N, ...] gives each
    pair the bits of a call of that pair alone. Each number of pairs is tried in order and from the last pair backwards.
    """
    pairs = x.split(COPIES)
    alone = [function(pair.clone()) for pair in pairs]
    for count in range(2, len(pairs) + 1):
        for order in (slice(0, count), slice(None, -count - 1, -1)):
            if not same_bits(function(torch.cat(pairs[order])), torch.cat(alone[order])):
                return count - 1
    return len(pairs)


def _projections(model: Decoder, trial: Decoder) -> dict[str, tuple[Projections, int]]:
    """Returns (function, width of its input) by name: the trial layer's projections, and a head of the model's size."""
    config, layer = trial.config, trial.layers[0]
    return {
        "q_proj, k_proj, v_proj": (layer.qkv_proj, config.hidden_size),
        "o_proj": (layer.o_proj, config.num_attention_heads * config.head_dim),
        "gate_proj, up_proj": (layer.gate_up_proj, config.hidden_size),
        "down_proj": (layer.down_proj, config.intermediate_size),
        HEAD: (trial.lm_head if config.vocab_size == model.config.vocab_size else model.lm_head, config.hidden_size),
    }


def _joined(projections: Projections, x: Tensor) -> Tensor:
    return torch.cat(list(projections(x)), dim=-1)  # [..., sum of the outputs]


def _wide_rows(most: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns rows [2 * most, 1, width] of many magnitudes, whose products with a trial layer's weights cancel."""
    return cancelling(COPIES * most, width, 2, dtype, device)[0][:, None]


def _way(projections: Plain | Packed, most: int) -> Way | None:
    """Returns how projections are computed for up to `most` requests: None where they need no other way.

    Packed: the packed call at every row count, if that keeps every request's bits; at load it was tried for one request
    only. Plain: one call, if that keeps them; else the faster of two ways that do, one batched product of pairs (not
    tried on large weights) and a call for each request.
    """
    first = projections.run.packed if isinstance(projections, Packed) else projections.parts[0][0]
    x = _wide_rows(most, first.shape[1], first.dtype, first.device)
    if isinstance(projections, Packed):
        usable = projections.counts is not None and COPIES in projections.counts
        holds = usable and row_counts_equal(partial(_joined, replace(projections, counts=None)), x) == most
        return Packed if holds else None
    if row_counts_equal(partial(_joined, projections), x) == most:
        return None
    pairs, each = Pairs(projections.parts), OneCallEach(projections.parts)
    large = any(weight.numel() > LARGE for weight, _ in projections.parts)
    if large or row_counts_equal(partial(_joined, pairs), x) < most:
        return OneCallEach
    # both have the same bits: the shortest of a few calls decides
    took = [min(repeat(partial(way, x), number=1, repeat=5)) for way in (pairs, each)]
    return Pairs if took[0] < took[1] else OneCallEach


def _parts(model: Decoder, trial: Decoder, most: int) -> Iterator[tuple[str, Rows, Tensor]]:
    """Yields each row-wise part of a step: its name, a function [2K, 1, ...] -> [2K, 1, ...], and rows to try it on."""
    config, layer = trial.config, trial.layers[0]
    dtype, device = model.numeric.torch_dtype, trial.norm.device
    wide = partial(_wide_rows, most, dtype=dtype, device=device)
    angles = torch.arange(config.head_dim, device=device).to(torch.float32)  # [D]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # as the model's: rounded to its dtype
    yield "the norm", lambda x: rms_norm(x, layer.input_layernorm, config.rms_norm_eps), wide(config.hidden_size)
    yield "the activation", lambda x: model.silu(x) * x, wide(config.intermediate_size)
    heads = wide(config.num_attention_heads * config.head_dim).unflatten(-1, (-1, config.head_dim))
    yield "the rotation", lambda x: apply_rotary_pos_emb(x, cos, sin), heads  # [2 * most, 1, H, D]
    for name, (run, width) in _projections(model, trial).items():
        if name == HEAD and isinstance(run, OneCallEach):
            continue  # a call for each request has its bits by construction, and a large head would take long
        yield name, partial(_joined, run), wide(width).to(model.norm.device if name == HEAD else device)


def _trial_layer(model: Decoder) -> Decoder:
    """Returns one layer of the model's shapes under its kernels, whose weights cancel against `_wide_rows`.

    So does its head, of the model's vocabulary unless a second one of that size would be too large.
    """
    config, numeric = model.config, model.numeric

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float("norm" in name))
        return cancelling(1, shape[1], shape[0], numeric.torch_dtype, torch.device("cpu"))[1]

    small = config.vocab_size * config.hidden_size <= LARGE
    return one_layer(numeric, config, config.vocab_size if small else FEW_TOKENS, weight)


def _layer_size(model: Decoder, most: int) -> int:
    """Returns the largest K up to `most` such that in steps of 2, 3, ..., K requests through the model's first layer,
    each over caches of different lengths, every observed tensor has the bits of K steps of one request.
    """
    one = copy.copy(model)
    one.config = replace(model.config, num_hidden_layers=1)
    one.layers, one.devices = model.layers[:1], model.devices[:1]
    one.norm = model.norm.to(one.devices[0])
    requests = [_request(model, number) for number in range(most)]
    alone = [_observed(one, [request]) for request in requests]
    for count in range(2, most + 1):
        together = _observed(one, requests[:count])
        for name, found in together.items():
            if not same_bits(found, torch.cat([steps[name] for steps in alone[:count]])):
                return count - 1
    return most


def _observed(model: Decoder, requests: Sequence[Request]) -> dict[str, Tensor]:
    """Returns every step of the call by name. One request runs as the plain decoder call that the batch must equal."""
    steps: dict[str, Tensor] = {}
    if len(requests) == 1:
        only = requests[0]
        model(only.input_ids, only.roles, only.position_ids, only.mask, only.cache, steps.__setitem__)
    else:
        step_together(model, requests, steps.__setitem__)
    return {name: tensor.contiguous() for name, tensor in steps.items()}


def _request(model: Decoder, number: int) -> Request:
    """Returns random tokens and keys, a length that no other request has, and a mask that hides some keys."""
    config, device = model.config, model.numeric.torch_device
    generator = torch.Generator().manual_seed(number)
    # every other request has a second block of keys, in whose place `blocked` gives the shorter requests zeros
    length = min(3 + 7 * number + KEY_BLOCK * (number % 2), config.max_position_embeddings - 1)
    mask = (torch.rand(length + 1, generator=generator) < 0.8).index_fill(0, torch.tensor(length), True)
    token = int(torch.randint(config.vocab_size, (1,), generator=generator))
    numbers = [torch.full((COPIES, 1), n, device=device) for n in (token, number % NUM_ROLES, length)]
    roles = None if model.role_embedding is None else numbers[1]
    cache = random_kv(model.numeric, config, length, seed=number)
    return Request(numbers[0], roles, numbers[2], mask.to(device).expand(COPIES, 1, 1, -1), cache)
