"""Roles: the one visibility table, the row offset, and the attention mask they give."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minimodel.errors import refuse

ROLE_NAMES = ("prompt", "branch_1", "branch_2", "branch_3", "merge", "answer")
PROMPT, BRANCH_1, BRANCH_2, BRANCH_3, MERGE, ANSWER = range(6)
NUM_ROLES = 6

# Row: the query token's raw role. Column: the key token's raw role. 1: may attend (within causality).
# The paper (section 3.1, Table 2) states that answer tokens cannot attend to branch tokens; that a branch sees the
# prompt and itself is our reading of "multi-branch". A checkpoint's contract.json may hold another table.
VISIBILITY: tuple[tuple[int, ...], ...] = (
    (1, 0, 0, 0, 0, 0),  # prompt
    (1, 1, 0, 0, 0, 0),  # branch 1
    (1, 0, 1, 0, 0, 0),  # branch 2
    (1, 0, 0, 1, 0, 0),  # branch 3
    (1, 1, 1, 1, 1, 0),  # merge
    (1, 0, 0, 0, 1, 1),  # answer
)
ROLE_OFFSET = 8  # raw role r reads row 8 + r of the role table; rows 0-7 belong to the checkpoint's earlier training


@dataclass(frozen=True)
class RoleRules:
    """How a checkpoint reads roles: the row offset (embedding only) and the visibility table (raw roles)."""

    role_offset: int = ROLE_OFFSET
    visibility: tuple[tuple[int, ...], ...] = VISIBILITY

    def __post_init__(self) -> None:
        for role, row in enumerate(self.visibility):
            if row[role] != 1:  # such a token could attend to nothing at the start of its block
                raise refuse(f"visibility row {role} ({ROLE_NAMES[role]})", "a 1 on the diagonal", list(row))

    @classmethod
    def from_contract(cls, raw: dict[str, Any], where: str = "contract.json") -> "RoleRules":
        """Reads `role_offset` and `visibility` of a contract object; absent keys take this file's."""
        offset = raw.get("role_offset", ROLE_OFFSET)
        if type(offset) is not int or not 0 <= offset <= 1 << 16:
            raise refuse(f"{where}: role_offset", "an integer from 0 to 65536", offset)
        table = raw.get("visibility", [list(row) for row in VISIBILITY])
        if not isinstance(table, list) or len(table) != NUM_ROLES:
            raise refuse(f"{where}: visibility", "six rows, one a role", table)
        for role, row in enumerate(table):
            at = f"{where}: visibility row {role} ({ROLE_NAMES[role]})"
            if not isinstance(row, list) or len(row) != NUM_ROLES or any(type(x) is not int or x >> 1 for x in row):
                raise refuse(at, "six entries of 0 or 1", row)
            if row[role] != 1:
                raise refuse(at, "a 1 on the diagonal", row)
        return cls(offset, tuple(tuple(row) for row in table))


def visibility_tensor(visibility: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """bool [6, 6], [query role, key role]."""
    return torch.tensor(visibility, dtype=torch.bool, device=device)


def check_ids(name: str, ids: Tensor, limit: int) -> int:
    """Returns the largest id; InputError unless all are from 0 to limit - 1, as indexing reads negative ones backwards.

    On an accelerator nothing is checked and -1 returned: reading a value back would wait for the device in every step.
    """
    if ids.device.type != "cpu" or ids.numel() == 0:
        return -1
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= limit:
        raise refuse(name, f"integers from 0 to {limit - 1}", low if low < 0 else high)
    return high


def position_ids(valid: Tensor) -> Tensor:
    """valid bool [B, S] -> int64 [B, S]: non-padding tokens count from zero; padding gets 0, which nothing reads."""
    return (valid.to(torch.int64).cumsum(dim=-1) - 1).clamp_min(0)


def attention_mask(
    roles_query: Tensor,
    roles_key: Tensor,
    valid_query: Tensor | None = None,
    valid_key: Tensor | None = None,
    visibility: tuple[tuple[int, ...], ...] | None = VISIBILITY,
) -> Tensor:
    """Causal AND padding AND role visibility (paper, section 3.1): bool [B, 1, T, S], True where attention is allowed.

    roles_query [B, T] and roles_key [B, S] are raw roles; the T queries are the last T of the S slots. valid_query
    [B, T] and valid_key [B, S] are False at padding (None: no padding). `visibility` None leaves it at causal AND
    padding, as a stock checkpoint wants.
    """
    check_ids("roles", roles_query, NUM_ROLES)
    check_ids("roles", roles_key, NUM_ROLES)
    length, key_length = roles_query.shape[1], roles_key.shape[1]
    rows = torch.arange(key_length - length, key_length, device=roles_key.device)
    mask = (torch.arange(key_length, device=roles_key.device)[None, :] <= rows[:, None])[None]
    if visibility is not None:
        table = visibility_tensor(visibility, roles_key.device)
        mask = mask & table[roles_query[:, :, None], roles_key[:, None, :]]
    if valid_key is not None:
        mask = mask & valid_key[:, None, :]
    if valid_query is not None:
        mask = mask & valid_query[:, :, None]
    return mask.expand(roles_key.shape[0], length, key_length)[:, None]
