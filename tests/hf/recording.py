"""The decoding contract run with transformers: live, incremental and prefill boundaries, replicas, and suffixes.

Embedding, decoder, DynamicCache, SDPA and head are transformers'. Mask rows, positions and the greedy choice are
written out here afresh, in the plainest form, and not shared with the code that they check. Shared is what tokens mean
(contract, structure) and what a ledger holds (Boundary, Suffix).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.isolation import disjoint
from cache.kv import KVCache
from decode.contract import Contract
from decode.greedy import Generated, Suffix
from decode.record import FunctionalRecord
from decode.state import State, Structure, advance, content_of, forced
from minimodel.bits import RowFailure, require_equal_copies
from minimodel.decoder import Observe
from minimodel.roles import ANSWER, MERGE
from tests.hf import versions
from tests.hf.hooks import observing
from tests.hf.reference import Reference

COPIES = 2


@dataclass
class Feeder:
    """One request in transformers, one token of every copy a call."""

    reference: Reference
    cache: Any = field(default_factory=versions.new_cache)
    roles: list[int] = field(default_factory=list)
    record: FunctionalRecord = field(default_factory=FunctionalRecord)

    def feed(self, token: int, role: int) -> Tensor:
        """hidden [B, 1, E] of the token. Position: its slot. Mask: its role's row of the table, key by key."""
        slot, device = len(self.roles), self.reference.device
        self.roles.append(role)
        table = self.reference.rules.visibility
        row = torch.tensor([table[role][key] == 1 for key in self.roles], device=device)
        position = torch.full((COPIES, 1), slot, device=device)
        mask = row.expand(COPIES, 1, 1, slot + 1)
        tokens, roles = (torch.full((COPIES, 1), value, device=device) for value in (token, role))
        return self.reference.hidden(tokens, roles, position, mask, self.cache, self.record.enter)


def pick(logits: Tensor, eligible: Tensor) -> tuple[int, float, float]:
    """The lowest of the eligible ids with the largest logit, its margin over the next best, and its value.

    logits [B, V], the copies, in the model dtype, widened exactly to float64 here. RowFailure as the contract says.
    """
    require_equal_copies(logits, "logits")
    if not bool(torch.isfinite(logits).all()):
        raise RowFailure("logits: expected finite values, found NaN or infinity")
    ids = eligible.nonzero().flatten()
    values = logits[0, ids].to(torch.float64)
    best = int((values == values.max()).nonzero()[0])
    rest = torch.cat([values[:best], values[best + 1 :]])
    return int(ids[best]), float(values[best] - rest.max()), float(values[best])


def decode(
    feeder: Feeder, contract: Contract, structure: Structure, logits: Tensor | None, stop: Callable[[Structure], bool]
) -> Generated:
    """Greedy decoding until `stop`; the token at which it holds is fed too, unless it ends the answer."""
    chosen: list[tuple[int, int, float | None, float | None]] = []  # token, role, margin, top
    hidden: tuple[Tensor, ...] = ()  # of the last token
    while not stop(structure):
        token, margin, top = forced(contract, structure), None, None
        if token is None:
            assert logits is not None, "a free choice needs logits"
            token, margin, top = pick(logits, contract.eligible[structure.block].to(logits.device))
        role, structure = structure.block, advance(contract, structure, token)
        chosen.append((token, role, margin, top))
        if structure.done:
            break
        hidden = (feeder.feed(token, role),)
        wanted = not stop(structure) and forced(contract, structure) is None
        logits = feeder.reference.logits(hidden[0])[:, 0] if wanted else None
    return Generated(*zip(*chosen), structure, hidden)


@dataclass(frozen=True)
class Recorded:
    """A boundary, and the DynamicCache behind it: the boundary holds a copy of its bits in the ledger's own form."""

    boundary: Boundary
    cache: Any


@torch.inference_mode()
def record_live(reference: Reference, prompt: State, observe: Observe | None = None) -> Recorded:
    """Ordinary generation from the prompt block to the boundary, one call per token of the prompt."""
    feeder = Feeder(reference)
    with observing(reference.model.model, observe):
        for token, role in zip(prompt.tokens, prompt.roles):
            feeder.feed(token, role)
        out = decode(feeder, prompt.contract, prompt.structure, None, lambda structure: structure.at_boundary)
    state = State(prompt.contract, (*prompt.tokens, *out.tokens), (*prompt.roles, *out.roles), out.structure)
    return _finish("live", state, feeder, out.hidden[-1], observe, out.margins)


@torch.inference_mode()
def record_incremental(reference: Reference, state: State, observe: Observe | None = None) -> Recorded:
    """The same tokens, given one at a time, every array from the integers alone."""
    state = State.from_tokens(state.contract, state.tokens)
    feeder, hidden = Feeder(reference), torch.empty(0)
    with observing(reference.model.model, observe):
        for token, role in zip(state.tokens, state.roles):
            hidden = feeder.feed(token, role)
    return _finish("incremental", state, feeder, hidden, observe)


@torch.inference_mode()
def record_prefill(reference: Reference, state: State, observe: Observe | None = None) -> Recorded:
    """The same tokens in one call, every array from the integers alone."""
    state = State.from_tokens(state.contract, state.tokens)
    device, length = reference.device, len(state)
    tokens, roles = (torch.tensor(x, device=device).expand(COPIES, length) for x in (state.tokens, state.roles))
    positions = torch.arange(length, device=device).expand(COPIES, length)
    table = torch.tensor(reference.rules.visibility, dtype=torch.bool, device=device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() & table[roles[0]][:, roles[0]]
    feeder = Feeder(reference)
    feeder.roles.extend(state.roles)
    mask = mask.expand(COPIES, 1, length, length)
    with observing(reference.model.model, observe):
        hidden = reference.hidden(tokens, roles, positions, mask, feeder.cache, feeder.record.enter)
    return _finish("prefill", state, feeder, hidden, observe)


@torch.inference_mode()
def replica(recorded: Recorded) -> Recorded:
    """A deep copy of a live or incremental DynamicCache. (A prefill's replica is a second call.)"""
    boundary, cache = recorded.boundary, copy.deepcopy(recorded.cache)
    parts = {"cache": snapshot(cache), "logits": boundary.logits.clone(), "record": boundary.record.copy()}
    return _checked(replace(boundary, **parts), cache)


@torch.inference_mode()
def record_suffix(reference: Reference, recorded: Recorded) -> Suffix:
    """Continues a deep copy of the cache to the end of the answer. RowFailure when the recorded cache was written."""
    boundary = recorded.boundary
    contract = boundary.state.contract
    feeder = Feeder(reference, copy.deepcopy(recorded.cache), list(boundary.state.roles), boundary.record.copy())
    out = decode(feeder, contract, boundary.state.structure, boundary.logits, lambda structure: structure.done)
    ended = snapshot(feeder.cache)
    ended.require_equal_copies()
    if not snapshot(recorded.cache).equals(boundary.cache):
        raise RowFailure("DynamicCache: expected the boundary's bits after a continuation, found others")
    return Suffix(
        tokens=out.tokens,
        margins=out.margins,
        tops=out.tops,
        merge=content_of(contract, out.tokens, out.roles, MERGE),
        answer=content_of(contract, out.tokens, out.roles, ANSWER),
        functional_sha256=feeder.record.sha256(),
        synchronised=feeder.record.synchronised,
        cache_length=len(ended),
    )


def snapshot(cache: Any) -> KVCache:
    """The bits of a DynamicCache in our storage, compact: what a ledger digests and compares."""
    pairs = versions.keys_and_values(cache)
    held = KVCache(pairs[0][0].shape, pairs[0][0].dtype, [key.device for key, _ in pairs])
    for layer, (keys, values) in enumerate(pairs):
        held.append(layer, keys, values)
    return held


def require_disjoint(recorded: list[Recorded]) -> None:
    """RowFailure when two arms' DynamicCaches share a byte: the snapshots' own isolation says nothing about them."""
    tensors = [[tensor for pair in versions.keys_and_values(one.cache) for tensor in pair] for one in recorded]
    if not disjoint(*tensors):
        raise RowFailure("DynamicCache: expected separate storage per arm, found shared bytes")


def _finish(
    name: str,
    state: State,
    feeder: Feeder,
    hidden: Tensor,
    observe: Observe | None,
    margins: tuple[float | None, ...] = (),
) -> Recorded:
    logits = feeder.reference.logits(hidden[:, -1:])
    if observe is not None:
        observe("logits", logits)
    boundary = Boundary(name, state, snapshot(feeder.cache), logits[:, 0].clone(), feeder.record, margins)
    return _checked(boundary, feeder.cache)


def _checked(boundary: Boundary, cache: Any) -> Recorded:
    """Fails closed, as our own constructions do: equal copies, nothing NaN or infinite."""
    held, length = boundary.cache, len(boundary.state)
    assert len(held) == boundary.record.length == length, "cache, record and state differ in length"
    held.require_equal_copies()
    require_equal_copies(boundary.logits, "boundary logits")
    held.require_finite()
    return Recorded(boundary, cache)
