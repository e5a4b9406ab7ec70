"""Requests for the ladder: all six blocks with random content, two different rows of one length, and their mask."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decode.contract import Contract
from minimodel.roles import NUM_ROLES, VISIBILITY

# wide and long enough for the two SDPA kernels to differ in BF16 too: their sums differ late in FP32, and only a few
# of them lie where BF16 rounds apart
WIDE = {"hidden_size": 256}
CONTRACT = {"caps": {"branch": 64, "merge": 64, "answer": 32}}
CONTENT = (30, 25, 20, 22, 30, 20)


@dataclass(frozen=True)
class Request:
    """input_ids, roles, position_ids int64 [B, T]; mask bool [B, 1, T, T], or None for plain causal attention."""

    input_ids: Tensor
    roles: Tensor | None
    position_ids: Tensor
    mask: Tensor | None

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def call(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The arguments of one call over tokens start to stop-1, the earlier ones in the cache."""
        part = slice(start, stop)
        return (
            self.input_ids[:, part],
            None if self.roles is None else self.roles[:, part],
            self.position_ids[:, part],
            None if self.mask is None else self.mask[:, :, part, :stop],
        )


def role_mask(roles: Tensor, visibility: tuple[tuple[int, ...], ...] = VISIBILITY) -> Tensor:
    """roles [B, T] -> bool [B, 1, T, T], written out afresh: token q sees token k when k <= q and the table says so.

    The loops are the point: nothing of the decoder's own mask code is used.
    """
    batch, length = roles.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b, row in enumerate(roles.tolist()):
        for q in range(length):
            for k in range(q + 1):
                mask[b, 0, q, k] = visibility[row[q]][row[k]] == 1
    return mask


def six_blocks(directory: Path, seed: int = 0, content: tuple[int, ...] = (9, 6, 7, 5, 8, 4)) -> Request:
    """Two rows over all six blocks: random ordinary tokens, the second row's block lengths in another order."""
    contract = Contract.load(directory)
    generator = torch.Generator().manual_seed(seed)
    ordinary = contract.ordinary.nonzero().flatten()
    tokens, roles = [], []
    for lengths in (content, tuple(reversed(content))):
        ids: list[int] = []
        kinds: list[int] = []
        for role in range(NUM_ROLES):
            chosen = ordinary[torch.randint(len(ordinary), (lengths[role],), generator=generator)]
            ids += [contract.open_ids[role], *chosen.tolist(), contract.close_ids[role]]
            kinds += [role] * (lengths[role] + 2)
        tokens.append(ids)
        roles.append(kinds)
    role_ids = torch.tensor(roles)
    positions = torch.arange(role_ids.shape[1]).expand(2, -1)
    return Request(torch.tensor(tokens), role_ids, positions, role_mask(role_ids, contract.rules.visibility))


def plain(vocab_size: int, length: int = 48, seed: int = 0) -> Request:
    """Two rows of random tokens without roles and without a mask: what a stock checkpoint is given."""
    tokens = torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    return Request(tokens, None, torch.arange(length).expand(2, -1), None)
