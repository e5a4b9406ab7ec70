"""The functional record: one digest of token, role, position and mask row of every slot that entered the decoder."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decode.contract import Contract
from decode.state import State
from minimodel.errors import InputError

PENDING = 64  # calls of one token that are held before they are hashed: on a GPU, one wait for many calls


class FunctionalRecord:
    """The SHA-256 of token, role, position and mask row of every slot, in an encoding that is injective.

    `enter` is given to the decoder as `record` and takes these from the tensors of the call itself. The digest is of
    the first physical copy; `synchronised` is False once another copy of a call was given anything else.
    """

    def __init__(self) -> None:
        self._hash, self._synchronised = hashlib.sha256(), True
        self._pending: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]] = []
        self.length = 0  # slots entered

    def enter(self, input_ids: Tensor, roles: Tensor | None, position_ids: Tensor, mask: Tensor | None) -> None:
        """Adds one call of the decoder: int64 [B, T] three times, bool [B or 1, 1, T, S]; `roles` None: no role term;
        `mask` None: plain causal attention. The tensors may change afterwards.
        """
        if input_ids.shape[1] == 1:
            kept_roles, kept_mask = (None if part is None else part.clone() for part in (roles, mask))
            self._pending.append((input_ids.clone(), kept_roles, position_ids.clone(), kept_mask))
        else:
            self._fold()
            self._add_call(input_ids, roles, position_ids, mask, self.length)
        self.length += input_ids.shape[1]
        if len(self._pending) == PENDING:
            self._fold()

    @property
    def synchronised(self) -> bool:
        """Whether every call gave all its physical copies the same tokens, roles, positions and mask rows."""
        self._fold()
        return self._synchronised

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
        self._fold()
        other = FunctionalRecord()
        other._hash, other._synchronised, other.length = self._hash.copy(), self._synchronised, self.length
        return other

    def sha256(self) -> str:
        """Returns the first copy's digest."""
        self._fold()
        return self._hash.hexdigest()

    def _fold(self) -> None:
        calls, self._pending = self._pending, []
        for slot, call in enumerate(calls, start=self.length - len(calls)):
            self._add_call(*call, start=slot)

    def _add_call(
        self, input_ids: Tensor, roles: Tensor | None, position_ids: Tensor, mask: Tensor | None, start: int
    ) -> None:
        """Hashes the first copy's slots, the first of which is `start`, and compares the other copies with it."""
        length = input_ids.shape[1]
        numbers = [part if part is None else part.tolist() for part in (input_ids, roles, position_ids)]
        self._synchronised &= all(part is None or part.count(part[0]) == len(part) for part in numbers)
        if mask is not None:
            rows = mask[:, 0].cpu()  # [B or 1, T, S]
            start = rows.shape[2] - length
            self._synchronised &= torch.equal(rows, rows[:1].expand_as(rows))
            seen = rows[0].numpy()
            later = rows[0].triu(start + 1).any(dim=1).tolist() if length > 1 else [False]
        for row in range(length):
            token, role, position = (None if part is None else part[0][row] for part in numbers)
            visible = b"\x01" * (start + row + 1)
            if mask is not None:  # a mask row that allows a later slot is hashed whole; no correct construction has one
                visible = seen[row, : None if later[row] else start + row + 1].tobytes()
            self._add(token, role, position, visible)

    def _add(self, token: int | None, role: int | None, position: int | None, visible: bytes) -> None:
        """visible: one byte per key, through this token's own slot."""
        self._hash.update(f"{token},{role},{position},{len(visible)}:".encode("ascii") + visible)


def derived_sha256(contract: Contract, tokens: Iterable[int]) -> str | None:
    """Returns the digest that the record of these tokens must have: each role follows from the tokens before it.

    A closing delimiter that ends the answer has no part in it, as it never enters the decoder. None when the contract
    does not allow the tokens.
    """
    try:
        state = State.from_tokens(contract, tokens)
    except InputError:
        return None
    fed = len(state) - state.structure.done
    return FunctionalRecord.of_state(state.tokens[:fed], state.roles[:fed], contract.rules.visibility).sha256()


def causal_sha256(tokens: Sequence[int]) -> str:
    """Returns the digest that these tokens' record must have in a stock decoder: no roles, plain causal attention."""
    record = FunctionalRecord()
    for slot, token in enumerate(tokens):
        record._add(token, None, slot, b"\x01" * (slot + 1))
    return record.sha256()
