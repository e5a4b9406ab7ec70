"""The tokens that every arm is given: random ordinary ids under the roles of a prefix and its merge block."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from decode.contract import Contract
from decode.record import FunctionalRecord
from minimodel.bits import COPIES
from minimodel.roles import MERGE, attention_mask

SEED = 20260728


@dataclass(frozen=True)
class Workload:
    """Tokens and roles of one request. The first fifth is prompt, a fifth each branch, the rest merge, so that the
    last tokens see every key but none sees a sibling branch.
    """

    contract: Contract
    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, contract: Contract, length: int, device: torch.device) -> "Workload":
        """`length` tokens; a shorter workload is not the start of a longer one, as its blocks are shorter."""
        ordinary = contract.ordinary.nonzero().flatten()
        chosen = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(SEED))
        roles = tuple(min(5 * slot // length, MERGE) for slot in range(length))
        return cls(contract, tuple(ordinary[chosen].tolist()), roles, device)

    def __len__(self) -> int:
        return len(self.tokens)

    def steps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(token, role) of slots start to stop-1."""
        return zip(self.tokens[start:stop], self.roles[start:stop])

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        roles = torch.tensor(self.roles, device=self.device)[None]
        mask = attention_mask(roles, roles, visibility=self.contract.rules.visibility)
        tokens = torch.tensor(self.tokens, device=self.device).expand(COPIES, -1)
        positions = torch.arange(len(self), device=self.device).expand(COPIES, -1)
        return tokens, roles.expand(COPIES, -1), positions, mask.expand(COPIES, -1, -1, -1)

    def call(self, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input_ids, roles, position_ids [B, T] and mask [B, 1, T, T] of one call of the first `length` tokens."""
        tokens, roles, positions, mask = self._tensors
        return tokens[:, :length], roles[:, :length], positions[:, :length], mask[:, :, :length, :length]

    def record(self, length: int) -> FunctionalRecord:
        """What a stepper has fed after the first `length` tokens."""
        visibility = self.contract.rules.visibility
        return FunctionalRecord.of_state(self.tokens[:length], self.roles[:length], visibility)
