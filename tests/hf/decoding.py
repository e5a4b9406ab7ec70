"""Greedy decoding with transformers, one token of every copy a call.

Embedding, decoder, DynamicCache, SDPA and head are transformers'; mask rows, positions and the greedy choice are
written out here afresh, in the plainest form, and not shared with the code that they check. Shared is what tokens mean
(contract, structure).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.contract import Contract
from decode.record import FunctionalRecord
from decode.structure import Structure, advance, forced
from minimodel.bits import RowFailure, require_equal_copies
from tests.hf import versions
from tests.hf.reference import Reference

COPIES = 2


@dataclass
class Feeder:
    """One request in transformers, one token of every copy a call."""

    reference: Reference
    cache: Any
    roles: list[int]
    record: FunctionalRecord

    @classmethod
    def empty(cls, reference: Reference) -> "Feeder":
        return cls(reference, versions.new_cache(), [], FunctionalRecord())

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


@dataclass(frozen=True)
class Decoded:
    """Tokens chosen or forced, their roles, each choice's margin and value (None where forced), and how it ended."""

    tokens: list[int]
    roles: list[int]
    margins: list[float | None]
    tops: list[float | None]
    structure: Structure
    hidden: Tensor


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
) -> Decoded:
    """Greedy decoding until `stop`; the token at which it holds is fed too, unless it ends the answer."""
    out = Decoded([], [], [], [], structure, torch.empty(0))
    hidden = out.hidden
    while not stop(structure):
        token, margin, top = forced(contract, structure), None, None
        if token is None:
            assert logits is not None, "a free choice needs logits"
            token, margin, top = pick(logits, contract.eligible[structure.block].to(logits.device))
        role, structure = structure.block, advance(contract, structure, token)
        out.tokens.append(token)
        out.roles.append(role)
        out.margins.append(margin)
        out.tops.append(top)
        if structure.done:
            break
        hidden = feeder.feed(token, role)
        wanted = not stop(structure) and forced(contract, structure) is None
        logits = feeder.reference.logits(hidden)[:, 0] if wanted else None
    return Decoded(out.tokens, out.roles, out.margins, out.tops, structure, hidden)
