"""Ten tokens over all six roles, the tiny decoder's shape, and one forward call."""

import torch

from cache import KVCache
from minimodel import Decoder
from minimodel.roles import attention_mask

TOKENS = [5, 9, 200, 31, 31, 7, 260, 12, 99, 268]
ROLES = [0, 0, 0, 1, 1, 2, 3, 4, 4, 5]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32


def call(model: Decoder, cache: KVCache | None = None, **changes: torch.Tensor | None) -> torch.Tensor:
    """One forward call over TOKENS, in the model's own visibility."""
    roles = torch.tensor([ROLES])
    inputs = {
        "input_ids": torch.tensor([TOKENS]),
        "roles": roles,
        "position_ids": torch.arange(len(TOKENS))[None],
        "mask": attention_mask(roles, roles),
        **changes,
    }
    with torch.inference_mode():
        return model(**inputs, cache=cache)  # type: ignore[arg-type]
