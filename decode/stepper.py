"""Feeds a decoder one token at a time: position, role and mask row of every step, and a record of what entered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.record import FunctionalRecord
from minimodel.decoder import Cache, Decoder, Observe
from minimodel.errors import InputError
from minimodel.roles import NUM_ROLES, RoleRules, visibility_tensor

Call = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # input_ids, roles, position_ids [B, 1], mask [B, 1, 1, S]


class Stepper:
    """One request in the decoder: `feed` advances position and cache slot by one, the same for every physical copy."""

    def __init__(self, model: Decoder, cache: Cache, copies: int, capacity: int) -> None:
        """cache: empty, unless `resume` is called next. capacity: the most tokens that it will hold."""
        require_context(model, capacity)
        device = model.numeric.torch_device
        self.model, self.cache, self.copies, self.length = model, cache, copies, 0
        self.record = FunctionalRecord()
        self._table = visibility_tensor(model.rules.visibility, device)  # [6, 6]
        # row r: the slots that a query of role r may attend to; a step fills one column and reads one row
        self._visible = torch.zeros(NUM_ROLES, capacity, dtype=torch.bool, device=device)  # [6, capacity]
        self._positions = torch.arange(capacity, device=device).expand(copies, capacity)  # [B, capacity]
        self._roles = torch.arange(NUM_ROLES, device=device)[:, None, None].expand(NUM_ROLES, copies, 1)  # [6, B, 1]

    def resume(self, roles: Sequence[int], record: FunctionalRecord) -> None:
        """Continues after the tokens that the cache already holds, given their roles and the record of their entry."""
        assert self.length == 0 and len(self.cache) == len(roles) == record.length, "cache and state differ in length"
        self._visible[:, : len(roles)] = self._table[:, torch.tensor(list(roles), device=self._table.device)]
        self.length, self.record = len(roles), record.copy()

    def call(self, token: int, role: int) -> Call:
        """Advances by one token and returns the decoder's arguments for it."""
        slot = self.length
        self._visible[:, slot] = self._table[:, role]
        row = self._visible[role, : slot + 1]
        self.length = slot + 1
        return (
            torch.full((self.copies, 1), token, device=row.device),
            self._roles[role],
            self._positions[:, slot : slot + 1],
            row.expand(self.copies, 1, 1, slot + 1),
        )

    def feed(self, token: int, role: int, observe: Observe | None = None) -> Tensor:
        """Runs one token of every copy through the decoder and returns its hidden state [B, 1, E]."""
        return self.model(*self.call(token, role), self.cache, observe, self.record.enter)


class CausalStepper(Stepper):
    """One request on a stock checkpoint: no role term, and every token attends to all before it."""

    def call(self, token: int, role: int) -> Call:
        """Returns the same arguments without roles and mask; `role` is ignored."""
        input_ids, _, position_ids, _ = super().call(token, role)
        return input_ids, None, position_ids, None


def require_context(model: Decoder, tokens: int) -> None:
    """InputError for more tokens than the model has positions."""
    if tokens > (limit := model.config.max_position_embeddings):
        raise InputError(
            f"context: expected at most max_position_embeddings {limit} tokens, found {tokens}; "
            "shorten the prompt or lower the caps"
        )


def make_ready(model: Decoder, rules: RoleRules) -> None:
    """Puts the model's numeric contract in force again, as the process may have changed a setting since the load.

    rules: those of the state to decode. InputError unless they are the model's.
    """
    model.numeric.apply()
    if model.rules != rules:
        raise InputError("contract: expected the role rules of the model's own checkpoint, found another contract's")
