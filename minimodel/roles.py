"""Roles, the visibility table, and the attention mask and position ids that follow from them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minimodel.errors import refuse

# a raw role, as in the paper, is an index into these names: the block that a token belongs to
ROLE_NAMES = ("prompt", "branch_1", "branch_2", "branch_3", "merge", "answer")
PROMPT, BRANCH_1, BRANCH_2, BRANCH_3, MERGE, ANSWER = range(6)
NUM_ROLES = 6

# Row: the query token's raw role. Column: the key token's raw role. 1: may attend (within causality).
# The paper (section 3.1, Table 2) states that answer tokens cannot attend to branch tokens; that a branch sees the
# prompt and itself is our reading of "multi-branch". A checkpoint's contract.json may hold another table.
Table = tuple[tuple[int, ...], ...]
VISIBILITY: Table = (
    (1, 0, 0, 0, 0, 0),  # prompt
    (1, 1, 0, 0, 0, 0),  # branch 1
    (1, 0, 1, 0, 0, 0),  # branch 2
    (1, 0, 0, 1, 0, 0),  # branch 3
    (1, 1, 1, 1, 1, 0),  # merge
    (1, 0, 0, 0, 1, 1),  # answer
)
ROLE_OFFSET = 8  # raw role r reads row 8 + r of the role table; rows 0-7 belong to the checkpoint's earlier training
ROLE_ROWS = ROLE_OFFSET + NUM_ROLES  # least rows of a role table


@dataclass(frozen=True)
class RoleRules:
    """How a checkpoint reads roles."""

    role_offset: int = ROLE_OFFSET  # of the role-embedding row only; the visibility table is indexed by raw roles
    visibility: Table = VISIBILITY


def visibility_tensor(visibility: Table, device: torch.device) -> Tensor:
    """Returns the table as bool [6, 6]: [query role, key role]."""
    return torch.tensor(visibility, dtype=torch.bool, device=device)


def position_ids(valid: Tensor) -> Tensor:
    """valid bool [B, S], False at padding -> int64 [B, S]: others count from 0; padding gets 0, which is unused."""
    return (valid.to(torch.int64).cumsum(dim=-1) - 1).clamp_min(0)


def causal_mask(length: int, key_length: int, device: torch.device) -> Tensor:
    """Returns bool [1, 1, T, S], where the T queries are the last T of the S positions."""
    queries = torch.arange(key_length - length, key_length, device=device)  # [T]
    keys = torch.arange(key_length, device=device)  # [S]
    return (keys[None, :] <= queries[:, None])[None, None]  # [1, 1, T, S]


def attention_mask(
    roles_query: Tensor,
    roles_key: Tensor,
    valid_query: Tensor | None = None,
    valid_key: Tensor | None = None,
    visibility: Table | None = VISIBILITY,
) -> Tensor:
    """Causal AND padding AND role visibility (paper, section 3.1): bool [B, 1, T, S], True where attention is allowed.

    roles_query [B, T] and roles_key [B, S] are raw roles; the T queries are the last T of the S slots. valid_query
    [B, T] and valid_key [B, S] are False at padding (None: no padding). `visibility` None leaves roles out, as for a
    stock checkpoint.
    """
    check_ids("roles", roles_query, NUM_ROLES)
    check_ids("roles", roles_key, NUM_ROLES)
    batch, length, key_length = roles_key.shape[0], roles_query.shape[1], roles_key.shape[1]
    mask = causal_mask(length, key_length, roles_key.device)[0]  # [1, T, S]
    if visibility is not None:
        table = visibility_tensor(visibility, roles_key.device)  # [6, 6]
        mask = mask & table[roles_query[:, :, None], roles_key[:, None, :]]  # [B, T, S]
    if valid_key is not None:
        mask = mask & valid_key[:, None, :]  # [B, T, S]
    if valid_query is not None:
        mask = mask & valid_query[:, :, None]  # [B, T, S]
    return mask.expand(batch, length, key_length)[:, None]  # [B, 1, T, S]


def zero_dead_rows(out: Tensor, mask: Tensor) -> Tensor:
    """Returns out [B, H, T, D] with zeros where a query may attend to nothing: kernels leave NaN there, or an average.

    Only padding queries are such rows; the others keep their bits. mask: bool [B or 1, 1, T, S].
    """
    # fast path: if every query may attend to itself, no row is dead
    if bool(mask.diagonal(offset=mask.shape[-1] - mask.shape[-2], dim1=-2, dim2=-1).all()):
        return out
    return out.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # [B, H, T, D], by [B or 1, 1, T, 1]


def check_mask(mask: Tensor | None, batch: int, length: int, key_length: int) -> None:
    """InputError unless the mask is None or bool [B or 1, 1, T, S]: numbers could mean "add" as well as "allowed"."""
    if mask is not None and mask.dtype != torch.bool:
        raise refuse("attention mask dtype", "torch.bool, True where a query may attend", mask.dtype)
    if mask is not None and tuple(mask.shape) not in ((batch, 1, length, key_length), (1, 1, length, key_length)):
        raise refuse("attention mask shape", f"[{batch}, 1, {length}, {key_length}]", list(mask.shape))


def check_ids(name: str, ids: Tensor, limit: int, shape: tuple[int, ...] | None = None) -> int:
    """Returns the largest id. InputError unless all are from 0 to limit - 1: indexing reads negative ones backwards.

    shape: [B, T]; InputError unless the ids are [B or 1, T], as a single column would be taken for every token. On an
    accelerator no value is checked and -1 is returned: reading one back would wait for the device every step.
    """
    if shape is not None and tuple(ids.shape) not in (tuple(shape), (1, shape[1])):
        raise refuse(f"{name} shape", str(list(shape)), list(ids.shape))
    if ids.device.type != "cpu" or ids.numel() == 0:
        return -1
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= limit:
        raise refuse(name, f"integers from 0 to {limit - 1}", low if low < 0 else high)
    return high
