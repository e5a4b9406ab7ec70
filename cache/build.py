"""The three constructions of the boundary state: live, incremental, prefill."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.kv import KVCache
from decode.greedy import Step, Steps, alone, generate
from decode.record import FunctionalRecord
from decode.state import State
from decode.stepper import Stepper, make_ready, require_context
from minimodel.bits import COPIES, RowFailure, require_equal_copies
from minimodel.decoder import Decoder, Observe
from minimodel.errors import InputError, refuse
from minimodel.roles import attention_mask


def build_live(model: Decoder, prompt: State, copies: int = COPIES, observe: Observe | None = None) -> Boundary:
    """Returns the boundary that ordinary greedy generation from a prompt block reaches, with the cache that it filled.

    The prompt, too, is fed one token at a time: the paper finds live and incremental caches equal on all layers.

    Decoding fills storage that could hold the longest prefix. The boundary owns a compact copy, which is compared with
    it bit for bit. A suffix is decoded on a further copy, so that the boundary stays as it is. Continuing in place
    would give the same bits: attention does not depend on the capacity behind its views.
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
    """Returns the boundary of `state.tokens`, fed one at a time. Only the last token's logits are computed."""
    return alone(incremental_steps(model, state, copies, observe))


def incremental_steps(
    model: Decoder, state: State, copies: int = COPIES, observe: Observe | None = None
) -> Steps[Boundary]:
    """Returns the steps of `build_incremental`."""
    state = _boundary_state(model, state)
    stepper = _stepper(model, len(state), copies)
    hidden = torch.empty(0)  # [B, 1, E] after each step
    for token, role in zip(state.tokens, state.roles):
        hidden, _ = yield Step(stepper, token, role, observe=observe)
    return _from_stepper("incremental", state, stepper, hidden, observe)


@torch.inference_mode()
def build_prefill(
    model: Decoder, state: State, copies: int = COPIES, chunk: int | None = None, observe: Observe | None = None
) -> Boundary:
    """Returns the boundary of `state.tokens` from one call, or from calls of `chunk` tokens (1: as incremental)."""
    state = _boundary_state(model, state)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise refuse("chunk", "a positive number of tokens, or none for one call", chunk)
    cache, record = KVCache.for_model(model, copies, len(state)), FunctionalRecord()
    device = model.numeric.torch_device
    tokens = torch.tensor(state.tokens, device=device).expand(copies, -1)  # [B, S]
    roles = torch.tensor(state.roles, device=device).expand(copies, -1)  # [B, S]
    positions = torch.arange(len(state), device=device).expand(copies, -1)  # [B, S]
    hidden, length = torch.empty(0), chunk or len(state)  # [B, T, E] after each call; T of a call
    for start in range(0, len(state), length):
        part = slice(start, min(start + length, len(state)))
        mask = attention_mask(roles[:1, part], roles[:1, : part.stop], visibility=model.rules.visibility)
        mask = mask.expand(copies, -1, -1, -1)  # [B, 1, T, S so far]
        hidden = model(tokens[:, part], roles[:, part], positions[:, part], mask, cache, observe, record.enter)
    rebuild = partial(build_prefill, model, state, copies, chunk)  # without the observer: a replica is not traced
    name = "prefill" if length >= len(state) else f"prefill_in_calls_of_{chunk}"
    logits = model.logits(hidden[:, -1:], observe)[:, 0].clone()  # [B, V]
    return _sound(Boundary(name, state, cache, logits, record, rebuild=rebuild))


def _stepper(model: Decoder, capacity: int, copies: int) -> Stepper:
    return Stepper(model, KVCache.for_model(model, copies, capacity), copies, capacity)


def _boundary_state(model: Decoder, state: State) -> State:
    """Returns the state derived again from its tokens alone, so that roles from live decoding are not reused.

    Puts the model's contract in force. InputError unless the state is at the boundary and fits the model's context.
    """
    make_ready(model, state.contract.rules)
    state = State.from_tokens(state.contract, state.tokens)
    if not state.structure.at_boundary:
        raise InputError("boundary: expected a state that ends with merge's opening delimiter")
    require_context(model, len(state))
    return state


def _from_stepper(name: str, state: State, stepper: Stepper, hidden: Tensor, observe: Observe | None) -> Boundary:
    """Returns the boundary of the tokens that were fed. hidden [B, 1, E]: the last one's hidden state."""
    filled = stepper.cache
    assert isinstance(filled, KVCache)
    compact = filled if filled.capacity == len(filled) else filled.copy()  # an incremental cache is compact already
    if not compact.equals(filled):
        raise RowFailure(f"{name}: expected a compact cache with the bits that decoding left, found others")
    logits = stepper.model.logits(hidden[:, -1:], observe)[:, 0].clone()  # [B, V]
    return _sound(Boundary(name, state, compact, logits, stepper.record))


def _sound(boundary: Boundary) -> Boundary:
    """Returns the boundary. RowFailure unless its copies agree in every bit and nothing is NaN or infinite."""
    cache = boundary.cache
    assert len(cache) == boundary.record.length == len(boundary.state), "cache, record and state differ in length"
    cache.require_equal_copies()
    require_equal_copies(boundary.logits, "boundary logits")
    cache.require_finite()
    return boundary
