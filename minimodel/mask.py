"""What a mask means, whatever kernel reads it: bool, True where a query may attend to a key."""

import torch
from torch import Tensor

from minimodel.errors import refuse


def zero_dead_rows(out: Tensor, mask: Tensor) -> Tensor:
    """out [B, H, T, D] with zeros in the rows that may attend to nothing, whatever the kernel left there (NaN, say).

    Only padding leaves such rows; live rows keep their bits. A row that may attend to itself is alive: that is looked
    at first, as it needs one entry a row and not all of them.
    """
    length, key_length = mask.shape[-2:]
    if bool(mask.diagonal(offset=key_length - length, dim1=-2, dim2=-1).all()):
        return out
    alive = mask.any(dim=-1, keepdim=True)
    return torch.where(alive, out, torch.zeros((), dtype=out.dtype, device=out.device))


def causal_mask(length: int, key_length: int, device: torch.device) -> Tensor:
    """bool [1, 1, T, S]: the T queries are the last T of the S positions."""
    rows = torch.arange(key_length - length, key_length, device=device)
    return (torch.arange(key_length, device=device)[None, :] <= rows[:, None])[None, None]


def check_mask(mask: Tensor | None, batch: int, length: int, key_length: int) -> None:
    """InputError unless the mask is bool [B or 1, 1, T, S]: 0/1 numbers could mean 'add' as well as 'may attend'."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise refuse("attention mask dtype", "torch.bool, True where a query may attend", mask.dtype)
    if tuple(mask.shape) not in ((batch, 1, length, key_length), (1, 1, length, key_length)):
        raise refuse("attention mask shape", f"[{batch}, 1, {length}, {key_length}]", list(mask.shape))
