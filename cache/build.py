"""The three constructions of the boundary state, never conflated: live, incremental, prefill."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.kv import KVCache
from decode.greedy import Step, Steps, alone, generate
from decode.record import FunctionalRecord
from decode.state import State
from decode.stepper import Stepper, make_ready
from minimodel.bits import COPIES, RowFailure, require_equal_copies
from minimodel.decoder import Decoder, Observe
from minimodel.errors import InputError, refuse
from minimodel.roles import attention_mask


def build_live(model: Decoder, prompt: State, copies: int = COPIES, observe: Observe | None = None) -> Boundary:
    """Returns the boundary that ordinary greedy generation from a prompt block reaches, with the cache that it filled.

    Decoding fills storage with room for the longest prefix. The boundary owns a compact copy, compared with it bit for
    bit; a continuation decodes on another copy, so that the boundary can be used again after any arm. Continuing in
    place would give the same bits: attention does not depend on the capacity behind its views.

    The prompt, too, is consumed one token at a time: the paper finds live and incremental caches equal on all layers.
    """
    return alone(live_steps(model, prompt, copies, observe))


def live_steps(model: Decoder, prompt: State, copies: int = COPIES, observe: Observe | None = None) -> Steps[Boundary]:
    """Returns the steps of `build_live`."""
    make_ready(model, prompt.contract.rules)
    if len(prompt) < 2 or prompt.structure.block != 1 or prompt.structure.open:
        raise InputError("live: expected a state that ends with the prompt's closing delimiter")
    stepper = _stepper(model, prompt.contract.prefix_limit(len(prompt)), copies)
    for token, role in zip(prompt.tokens, prompt.roles):
        yield Step(stepper, token, role, observe=observe)
    out = yield from generate(stepper, prompt.contract, prompt.structure, None, lambda s: s.at_boundary, observe)
    state = State(prompt.contract, prompt.tokens + out.tokens, prompt.roles + out.roles, out.structure)
    return replace(_from_stepper("live", state, stepper, out.hidden[-1], observe), margins=out.margins)


def build_incremental(model: Decoder, state: State, copies: int = COPIES, observe: Observe | None = None) -> Boundary:
    """Returns the boundary of `state.tokens`, fed one at a time; logits are computed only for the last token."""
    return alone(incremental_steps(model, state, copies, observe))


def incremental_steps(
    model: Decoder, state: State, copies: int = COPIES, observe: Observe | None = None
) -> Steps[Boundary]:
    """Returns the steps of `build_incremental`."""
    state = _boundary_state(model, state)
    stepper = _stepper(model, len(state), copies)
    hidden = torch.empty(0)
    for token, role in zip(state.tokens, state.roles):
        hidden, _ = yield Step(stepper, token, role, observe=observe)
    return _from_stepper("incremental", state, stepper, hidden, observe)


@torch.inference_mode()
def build_prefill(
    model: Decoder, state: State, copies: int = COPIES, chunk: int | None = None, observe: Observe | None = None
) -> Boundary:
    """Returns the boundary of `state.tokens` in one call, or in calls of `chunk` tokens (1: as incremental)."""
    state = _boundary_state(model, state)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise refuse("chunk", "a positive number of tokens, or none for one call", chunk)
    device = model.numeric.torch_device
    tokens = torch.tensor(state.tokens, device=device).expand(copies, -1)
    roles = torch.tensor(state.roles, device=device).expand(copies, -1)
    positions = torch.arange(len(state), device=device).expand(copies, -1)
    cache, record, hidden = KVCache.for_model(model, copies, len(state)), FunctionalRecord(), torch.empty(0)
    for start in range(0, len(state), chunk or len(state)):
        part = slice(start, min(start + (chunk or len(state)), len(state)))
        mask = attention_mask(roles[:1, part], roles[:1, : part.stop], visibility=model.rules.visibility)
        mask = mask.expand(copies, -1, -1, -1)
        hidden = model(tokens[:, part], roles[:, part], positions[:, part], mask, cache, observe, record.enter)
    again = partial(build_prefill, model, state, copies, chunk)  # without the observer: a replica is not traced
    name = "prefill" if chunk is None or chunk >= len(state) else f"prefill_in_calls_of_{chunk}"
    logits = model.logits(hidden[:, -1:], observe)[:, 0].clone()
    return _sound(Boundary(name, state, cache, logits, record, rebuild=again))


def _stepper(model: Decoder, capacity: int, copies: int) -> Stepper:
    return Stepper(model, KVCache.for_model(model, copies, capacity), copies, capacity)


def _boundary_state(model: Decoder, state: State) -> State:
    """Derives the state from the integer tokens alone: roles that live decoding accumulated are not taken over."""
    make_ready(model, state.contract.rules)
    state = State.from_tokens(state.contract, state.tokens)
    if not state.structure.at_boundary:
        raise InputError("boundary: expected a state that ends with merge's opening delimiter")
    limit = model.config.max_position_embeddings
    if len(state) > limit:
        raise InputError(f"context: expected at most max_position_embeddings {limit} tokens, found {len(state)}")
    return state


def _from_stepper(name: str, state: State, stepper: Stepper, hidden: Tensor, observe: Observe | None) -> Boundary:
    filled = stepper.cache
    assert isinstance(filled, KVCache)
    compact = filled if filled.capacity == len(filled) else filled.copy()  # an incremental cache is compact already
    if not compact.equals(filled):
        raise RowFailure(f"{name}: expected a compact cache with the bits that decoding left, found others")
    logits = stepper.model.logits(hidden[:, -1:], observe)[:, 0].clone()
    return _sound(Boundary(name, state, compact, logits, stepper.record))


def _sound(boundary: Boundary) -> Boundary:
    """RowFailure unless the copies agree in every bit and nothing is NaN or infinite."""
    cache = boundary.cache
    assert len(cache) == boundary.record.length == len(boundary.state), "cache, record and state differ in length"
    cache.require_equal_copies()
    require_equal_copies(boundary.logits, "boundary logits")
    cache.require_finite()
    return boundary
