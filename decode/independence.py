"""How many requests may step together on this machine: up to which row count every row-wise part keeps a pair's bits.

A library picks the order of its sums by the number of rows. So each part of a decode step is tried in every call that
2, 3, ... requests can make, two rows each: the linear maps by their shapes on sums that cancel (see
`minimodel.invariant.checks`), the norm, the activation, the rotation, the head, and one whole layer of the model with
attention over caches of different lengths. What is measured is a property of shapes, dtype, kernels and threads, not of
the numbers in a weight.
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
from minimodel.linear import LINEAR_KERNELS, Maps, Plain
from minimodel.packed import Packed
from minimodel.roles import NUM_ROLES
from minimodel.selfcheck import one_layer, random_kv

LARGEST = 16  # requests tried by default
FEW_TOKENS = 64  # embedding rows of the trial layer where the head is too large to be made twice


@dataclass(frozen=True)
class Together:
    """The most requests that may step together, and how."""

    size: int  # requests; 1 where no two may
    model: Decoder  # for `step_together`: the same weights, each plain map in the `Way` that keeps a pair's bits
    limit: str  # the part that allows no more than `size`; empty where all parts allow as many as were tried


_KNOWN: dict[object, tuple[int, dict[Shape, Way], SeveralAttention | None, str]] = {}


@torch.inference_mode()
def together_here(model: Decoder, most: int = LARGEST) -> Together:
    """Returns the largest number of requests up to `most` whose common step gives each of them the bits it has alone.

    Puts the model's numeric contract in force. A linear map whose rows do not keep their bits in one call takes them in
    another way (see `_way`). Attention takes all requests in one call where the kernel can and the layer's check holds.
    """
    model.numeric.apply()
    numeric = model.numeric
    kernels = LINEAR_KERNELS[numeric.linear], ATTENTION_KERNELS[numeric.attention]
    key = (numeric, model.config, model.role_embedding is None, most, *kernels)
    if key not in _KNOWN:
        trial = _trial_layer(model)
        known = [maps for maps in _maps(model, trial).values() if isinstance(maps, (Plain, Packed))]
        ways = {shape_of(maps): way for maps in known if (way := _way(maps, most))}
        size, limit = most, ""
        for name, function, x in _parts(taking(model, ways), taking(trial, ways), most):
            found = row_counts_equal(function, x[: COPIES * size])
            if found < size:
                size, limit = found, f"{name}, {COPIES * (found + 1)} rows"
        several = SEVERAL_KERNELS.get(numeric.attention)
        found = _layer_size(taking(model, ways, several), size)
        if several is not None and found < size:
            several, found = None, _layer_size(taking(model, ways), size)
        if found < size:
            size, limit = found, f"one whole layer, {COPIES * (found + 1)} rows"
        _KNOWN[key] = size, ways, several, limit
    size, ways, several, limit = _KNOWN[key]
    return Together(size, taking(model, ways, several), limit)


def row_counts_equal(function: Rows, x: Tensor) -> int:
    """Returns the largest K such that `function` gives each pair of rows the bits that a call of that pair alone gives
    it, in every call of 2, 3, ..., K pairs of x [2N, ...], in order and from the last pair backwards. From 1 to N.
    """
    pairs = x.split(COPIES)
    alone = [function(pair.clone()) for pair in pairs]
    for count in range(2, len(pairs) + 1):
        for order in (slice(0, count), slice(None, -count - 1, -1)):
            if not same_bits(function(torch.cat(pairs[order])), torch.cat(alone[order])):
                return count - 1
    return len(pairs)


def _maps(model: Decoder, trial: Decoder) -> dict[str, Maps]:
    """Returns the trial layer's maps by name, and the model's own head where the trial layer has none of its size."""
    layer = trial.layers[0]
    return {
        "the q, k and v maps": layer.qkv_proj,
        "the o map": layer.o_proj,
        "the gate and up maps": layer.gate_up_proj,
        "the down map": layer.down_proj,
        "the head": trial.lm_head if trial.config.vocab_size == model.config.vocab_size else model.lm_head,
    }


def _joined(maps: Maps, x: Tensor) -> Tensor:
    return torch.cat(list(maps(x)), dim=-1)


def _way(maps: Plain | Packed, most: int) -> Way | None:
    """Returns how maps take the rows of up to `most` requests: None where they need no other way.

    A packed weight was tried at load for one request only: the packed call is used for all where it keeps every pair's
    bits. Plain maps are called once where that keeps them, else in the faster of two ways that do, a batched product of
    pairs (tried on weights that are not large) and a call each.
    """
    weights = [maps.run.packed] if isinstance(maps, Packed) else [weight for weight, _ in maps.parts]
    x = cancelling(COPIES * most, weights[0].shape[1], 2, weights[0].dtype, weights[0].device)[0][:, None]
    if isinstance(maps, Packed):
        usable = maps.counts is not None and COPIES in maps.counts
        holds = usable and row_counts_equal(partial(_joined, replace(maps, counts=None)), x) == most
        return Packed if holds else None
    if row_counts_equal(partial(_joined, maps), x) == most:
        return None
    pairs, each = Pairs(maps.parts), OneCallEach(maps.parts)
    large = any(weight.numel() > LARGE for weight in weights)
    if large or row_counts_equal(partial(_joined, pairs), x) < most:
        return OneCallEach
    # both have the same bits: the shortest of a few calls decides
    took = [min(repeat(partial(way, x), number=1, repeat=5)) for way in (pairs, each)]
    return Pairs if took[0] < took[1] else OneCallEach


def _parts(model: Decoder, trial: Decoder, most: int) -> Iterator[tuple[str, Rows, Tensor]]:
    """Yields each row-wise part of a step: its name, a function [2K, 1, ...] -> [2K, 1, ...], and rows to try it on."""
    config, layer = trial.config, trial.layers[0]
    dtype, device = model.numeric.torch_dtype, trial.norm.device
    inner, projected = config.intermediate_size, config.num_attention_heads * config.head_dim

    def wide(width: int) -> Tensor:
        """[2 * most, 1, width]: terms of many magnitudes, whose products with the trial layer's weights cancel."""
        return cancelling(COPIES * most, width, 2, dtype, device)[0][:, None]

    angles = torch.arange(config.head_dim, device=device).to(torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = lambda x: rms_norm(x, layer.input_layernorm, config.rms_norm_eps)  # noqa: E731
    yield "the norm", norm, wide(config.hidden_size)
    yield "the activation", lambda x: model.silu(x) * x, wide(inner)
    heads = wide(projected).unflatten(-1, (-1, config.head_dim))  # [2 * most, 1, H, D]
    yield "the rotation", lambda x: apply_rotary_pos_emb(x, cos, sin), heads
    for name, maps in _maps(model, trial).items():
        width = {"the o map": projected, "the down map": inner}.get(name, config.hidden_size)
        if name != "the head" or not isinstance(maps, OneCallEach):  # a very large one would take long for nothing
            yield name, partial(_joined, maps), wide(width).to(model.norm.device if name == "the head" else device)


def _trial_layer(model: Decoder) -> Decoder:
    """Returns one layer of the model's shapes under its kernels, on weights whose products with `cancelling` rows are
    0; the head too, unless it is so large that a second one should not be made.
    """
    config, numeric = model.config, model.numeric

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float("norm" in name))
        return cancelling(1, shape[1], shape[0], numeric.torch_dtype, torch.device("cpu"))[1]

    return one_layer(
        numeric, config, config.vocab_size if config.vocab_size * config.hidden_size <= LARGE else FEW_TOKENS, weight
    )


def _layer_size(model: Decoder, most: int) -> int:
    """Returns the largest K up to `most` such that in steps of 2, 3, ..., K requests through the model's first layer,
    each over caches of different lengths, every observed tensor has the bits of K steps of one request.
    """
    one = copy.copy(model)
    one.config, one.layers, one.places = replace(model.config, num_hidden_layers=1), model.layers[:1], model.places[:1]
    one.norm = model.norm.to(one.places[0])
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
    # every other request reaches into the second block of keys, which `blocked` gives the others as zeros
    length = min(3 + 7 * number + KEY_BLOCK * (number % 2), config.max_position_embeddings - 1)
    mask = (torch.rand(length + 1, generator=generator) < 0.8).index_fill(0, torch.tensor(length), True)
    token = int(torch.randint(config.vocab_size, (1,), generator=generator))
    numbers = [torch.full((COPIES, 1), n, device=device) for n in (token, number % NUM_ROLES, length)]
    roles = None if model.role_embedding is None else numbers[1]
    cache = random_kv(model.numeric, config, length, seed=number)
    return Request(numbers[0], roles, numbers[2], mask.to(device).expand(COPIES, 1, 1, -1), cache)
