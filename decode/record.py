"""The functional record: one digest of token, role, position and mask row of every slot that entered the decoder."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decode.contract import Contract
from decode.state import State
from minimodel.errors import InputError


class FunctionalRecord:
    """The SHA-256 of token, role, position and mask row of every slot, in an encoding that is injective.

    The decoder calls `enter` (its argument `record`) with the tensors of each call. The digest is of the first physical
    copy; `synchronised` is False once another copy was given anything else.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.length = 0  # slots entered
        self.synchronised = True  # whether all copies of every call had the same tokens, roles, positions and mask rows

    def enter(self, input_ids: Tensor, roles: Tensor | None, position_ids: Tensor, mask: Tensor | None) -> None:
        """Adds one decoder call: input_ids, roles, position_ids int64 [B, T]; mask bool [B or 1, 1, T, S].

        `roles` None: no role term. `mask` None: plain causal attention.
        """
        length, start = input_ids.shape[1], self.length  # T, and S - T
        numbers = [part if part is None else part.tolist() for part in (input_ids, roles, position_ids)]
        self.synchronised &= all(part is None or part.count(part[0]) == len(part) for part in numbers)
        if mask is not None:
            rows = mask[:, 0].cpu()  # [B or 1, T, S]
            start = rows.shape[2] - length
            self.synchronised &= torch.equal(rows, rows[:1].expand_as(rows))
            seen = rows[0].numpy()  # [T, S]
            later = rows[0].triu(start + 1).any(dim=1).tolist() if length > 1 else [False]  # per row: sees a later slot
        for row in range(length):
            token, role, position = (None if part is None else part[0][row] for part in numbers)
            visible = b"\x01" * (start + row + 1)
            if mask is not None:  # a row that sees a later slot is hashed whole; no correct construction has one
                visible = seen[row, : None if later[row] else start + row + 1].tobytes()
            self._add(token, role, position, visible)
        self.length += length

    @classmethod
    def of_state(
        cls, tokens: Sequence[int], roles: Sequence[int], visibility: tuple[tuple[int, ...], ...]
    ) -> "FunctionalRecord":
        """Returns the record of a correct construction of these tokens: positions 0, 1, 2, ..., the mask's rows."""
        record, table = cls(), torch.tensor(visibility, dtype=torch.bool, device="cpu")
        keys = torch.tensor(list(roles), dtype=torch.int64, device="cpu")
        visible = table[:, keys].numpy()  # [6, S], one row per query role
        for slot, (token, role) in enumerate(zip(tokens, roles)):
            record._add(token, role, slot, visible[role, : slot + 1].tobytes())
        record.length = len(tokens)
        return record

    def copy(self) -> "FunctionalRecord":
        """Returns a record that continues independently."""
        other = FunctionalRecord()
        other._hash, other.length, other.synchronised = self._hash.copy(), self.length, self.synchronised
        return other

    def sha256(self) -> str:
        """Returns the first copy's digest."""
        return self._hash.hexdigest()

    def _add(self, token: int | None, role: int | None, position: int | None, visible: bytes) -> None:
        """Adds one slot. visible: one byte per key slot, 1 where the token may attend, its own slot the last."""
        self._hash.update(f"{token},{role},{position},{len(visible)}:".encode("ascii") + visible)


def derived_sha256(contract: Contract, tokens: Iterable[int]) -> str | None:
    """Returns the digest that the record of these tokens must have: each role follows from the tokens before it.

    The closing delimiter of the answer is left out: it never enters the decoder. Returns None when the contract does
    not allow the tokens.
    """
    try:
        state = State.from_tokens(contract, tokens)
    except InputError:
        return None
    fed = len(state) - (1 if state.structure.done else 0)
    return FunctionalRecord.of_state(state.tokens[:fed], state.roles[:fed], contract.rules.visibility).sha256()


def causal_sha256(tokens: Sequence[int]) -> str:
    """Returns the digest that these tokens' record must have in a stock decoder: no roles, plain causal attention."""
    record = FunctionalRecord()
    for slot, token in enumerate(tokens):
        record._add(token, None, slot, b"\x01" * (slot + 1))
    return record.sha256()
