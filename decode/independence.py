"""How many requests may step together on this machine: up to which row count every row-wise part keeps a pair's bits.

A library picks the order of its sums by the number of rows. So each part of a decode step is tried in every call that
2, 3, ... requests can make, two rows each: the linear maps by their shapes on sums that cancel (see
`minimodel.invariant.checks`), the norm, the activation, the rotation, the head, and one whole layer of the model with
attention over caches of different lengths. What is measured is a property of shapes, dtype, kernels and threads, not of
the numbers in a weight.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from decode.together import OneCallEach, Pairs, Request, Shape, Way, shape_of, step_together, taking
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import COPIES, same_bits
from minimodel.checkpoint import expected_shapes
from minimodel.decoder import Decoder
from minimodel.invariant.checks import Rows, cancelling
from minimodel.layers import rms_norm, rotate
from minimodel.linear import LINEAR_KERNELS, Plain
from minimodel.packed import LARGE, OneByOne
from minimodel.roles import NUM_ROLES

LARGEST = 16  # requests tried by default
FEW_TOKENS = 64  # embedding rows of the trial layer where the head is too large to be made twice


@dataclass(frozen=True)
class Together:
    """The most requests that may step together, and how."""

    size: int  # requests; 1 where no two may
    model: Decoder  # what `step_together` is given
    limit: str  # the part that allows no more than `size`; empty where all parts allow as many as were tried


_KNOWN: dict[object, tuple[int, dict[Shape, Way], str]] = {}


@torch.inference_mode()
def together_here(model: Decoder, most: int = LARGEST) -> Together:
    """The largest number of requests up to `most` whose common step gives each of them the bits it has alone.

    Puts the model's numeric contract in force. A plain linear map whose rows do not keep their bits in one call takes
    them in another way (see `_way`).
    """
    model.numeric.apply()
    numeric = model.numeric
    kernels = LINEAR_KERNELS[numeric.linear], ATTENTION_KERNELS[numeric.attention]
    key = (numeric, model.config, model.role_embedding is None, most, *kernels)
    if key not in _KNOWN:
        trial = _trial_layer(model)
        ways = {shape_of(linear): _way(linear, most) for linear in _plain_maps(model, trial)}
        size, limit = _largest(taking(model, ways), taking(trial, ways), most)
        _KNOWN[key] = size, ways, limit
    size, ways, limit = _KNOWN[key]
    return Together(size, taking(model, ways), limit)


def row_counts_equal(function: Rows, x: Tensor) -> int:
    """The largest K such that `function` gives each pair of rows the bits that a call of that pair alone gives it, in
    every call of 2, 3, ..., K pairs of x [2N, ...], in order and from the last pair backwards. From 1 to N.
    """
    pairs = x.split(COPIES)
    alone = [function(pair.clone()) for pair in pairs]
    for count in range(2, len(pairs) + 1):
        for order in (slice(0, count), slice(None, -count - 1, -1)):
            if not same_bits(function(torch.cat(pairs[order])), torch.cat(alone[order])):
                return count - 1
    return len(pairs)


def _plain_maps(model: Decoder, trial: Decoder) -> list[Plain]:
    """The plain maps of the trial layer, and the model's own head where the trial layer has none of its size."""
    layer = trial.layers[0]
    maps = [layer.o_proj, layer.down_proj, trial.lm_head if _has_head(model, trial) else model.lm_head]
    for joint in (layer.qkv_proj, layer.gate_up_proj):
        maps += joint.maps if isinstance(joint, OneByOne) else []
    return [linear for linear in maps if isinstance(linear, Plain)]


def _way(linear: Plain, most: int) -> Way:
    """How a plain map takes the rows of up to `most` requests: in one call where that keeps every pair's bits, else in
    the faster of two ways that do, a batched product of pairs (tried on weights that are not large) and a call each.
    """
    weight = linear.weight
    x = cancelling(COPIES * most, weight.shape[1], 2, weight.dtype, weight.device)[0][:, None]
    if row_counts_equal(linear, x) == most:
        return Plain
    pairs, each = Pairs(weight, linear.bias), OneCallEach(weight, linear.bias)
    if weight.numel() > LARGE or row_counts_equal(pairs, x) < most:
        return OneCallEach
    return Pairs if _seconds(pairs, x) < _seconds(each, x) else OneCallEach


def _seconds(function: Rows, x: Tensor) -> float:
    """The shortest of a few calls. It decides between ways of equal bits, never a bit."""
    found = []
    for _ in range(5):
        start = perf_counter()
        function(x).sum().item()
        found.append(perf_counter() - start)
    return min(found)


def _largest(model: Decoder, trial: Decoder, most: int) -> tuple[int, str]:
    """The requests that all parts allow, and the part that allows no more ("" where `most` is reached)."""
    size, limit = most, ""
    for name, function, x in _parts(model, trial, most):
        found = row_counts_equal(function, x[: COPIES * size])
        if found < size:
            size, limit = found, f"{name}, {COPIES * (found + 1)} rows"
    found = _layer_size(model, size)
    return (found, f"one whole layer, {COPIES * (found + 1)} rows") if found < size else (size, limit)


def _parts(model: Decoder, trial: Decoder, most: int) -> Iterator[tuple[str, Rows, Tensor]]:
    """Every row-wise part of a step: its name, the function [2K, 1, ...] -> [2K, 1, ...], and rows to try it on."""
    config, layer = trial.config, trial.layers[0]
    dtype, device = model.numeric.torch_dtype, trial.norm.device
    hidden, heads = config.hidden_size, config.num_attention_heads

    def wide(width: int) -> Tensor:
        """[2 * most, 1, width]: terms of many magnitudes, whose products with the trial layer's weights cancel."""
        return cancelling(COPIES * most, width, 2, dtype, device)[0][:, None]

    angles = torch.arange(config.head_dim, device=device).to(torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    yield "the norm", lambda x: rms_norm(x, layer.input_layernorm, config.rms_norm_eps), wide(hidden)
    yield "the activation", lambda x: model.silu(x) * x, wide(config.intermediate_size)
    rotated = wide(heads * config.head_dim).unflatten(-1, (heads, config.head_dim))
    yield "the rotation", lambda x: rotate(x, cos, sin), rotated
    yield "the q, k and v maps", partial(_joined, layer.qkv_proj), wide(hidden)
    yield "the o map", layer.o_proj, wide(heads * config.head_dim)
    yield "the gate and up maps", partial(_joined, layer.gate_up_proj), wide(hidden)
    yield "the down map", layer.down_proj, wide(config.intermediate_size)
    head = trial.lm_head if _has_head(model, trial) else model.lm_head
    if not isinstance(head, OneCallEach):  # a very large one would take long, and its calls are those of one request
        yield "the head", head, wide(hidden).to(model.norm.device)


def _has_head(model: Decoder, trial: Decoder) -> bool:
    return trial.config.vocab_size == model.config.vocab_size


def _joined(joint: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> Tensor:
    return torch.cat(list(joint(x)), dim=-1)


def _trial_layer(model: Decoder) -> Decoder:
    """One layer of the model's shapes under its kernels, on weights whose products with `cancelling` rows are 0; the
    head too, unless it is so large that a second one should not be made.
    """
    config, numeric = model.config, model.numeric
    rows = config.vocab_size if config.vocab_size * config.hidden_size <= LARGE else FEW_TOKENS
    config = replace(config, num_hidden_layers=1, vocab_size=rows, tie_word_embeddings=True)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 2:
            weights[name] = cancelling(1, shape[1], shape[0], numeric.torch_dtype, numeric.torch_device)[1]
        else:
            weights[name] = torch.full(
                shape, float("norm" in name), dtype=numeric.torch_dtype, device=numeric.torch_device
            )
    del weights["lm_head.weight"]
    return Decoder(config, weights, numeric)


def _layer_size(model: Decoder, most: int) -> int:
    """The largest K up to `most` such that in steps of 2, 3, ..., K requests through the model's first layer, each
    over a cache of its own length, every observed tensor has the bits of K steps of one request.
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
    """Every step of the call by name. One request runs as the plain decoder call that the batch must equal."""
    steps: dict[str, Tensor] = {}
    if len(requests) == 1:
        only = requests[0]
        model(only.input_ids, only.roles, only.position_ids, only.mask, only.cache, steps.__setitem__)
    else:
        step_together(model, requests, steps.__setitem__)
    return {name: tensor.contiguous() for name, tensor in steps.items()}


class _Before:
    """A cache of one layer that holds n tokens however often it is appended to."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values  # [2, H_kv, n, D]

    def __len__(self) -> int:
        return self.keys.shape[2]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)


def _request(model: Decoder, number: int) -> Request:
    """Random tokens and keys, a length that no other request has, and a mask that hides some keys."""
    config, device = model.config, model.numeric.torch_device
    generator = torch.Generator().manual_seed(number)
    length = min(3 + 7 * number, config.max_position_embeddings - 1)

    def random() -> Tensor:
        made = torch.randn(1, config.num_key_value_heads, length, config.head_dim, generator=generator)
        return made.to(model.numeric.torch_dtype).expand(COPIES, -1, -1, -1).to(model.places[0])

    mask = (torch.rand(length + 1, generator=generator) < 0.8).index_fill(0, torch.tensor(length), True)
    token = int(torch.randint(config.vocab_size, (1,), generator=generator))
    role = None if model.role_embedding is None else torch.full((COPIES, 1), number % NUM_ROLES, device=device)
    return Request(
        torch.full((COPIES, 1), token, device=device),
        role,
        torch.full((COPIES, 1), length, device=device),
        mask.to(device).expand(COPIES, 1, 1, -1),
        _Before(random(), random()),
    )
