"""The batch-invariant attention kernel: a query's bits depend only on its own row and the keys that it may attend to.

They do not depend on other queries, copies, later keys or threads. How each step ensures that:

- Keys lie in blocks of KEY_BLOCK slots counted from slot 0, the last one zero-padded. Query rows lie in tiles of fixed
  sizes. So a product has one of few shapes, tile x D x block or tile x block x D, and `checks.place_does_not_matter`
  holds for each: a row has the same bits at any place in the tile, for any number of blocks, and in tiles of all sizes.
- The maximum runs over all allowed keys; a maximum is exact in any order.
- Each block's sum of weights runs over KEY_BLOCK entries of one contiguous row, zeros included.
- The blocks' sums and products are added by a binary tree over the absolute block index, (0+1)+(2+3), ...: further keys
  only add exact zeros, or a level on top.

So a block that no query of a tile may attend to can be left out. Several requests can share one call, in which the
shorter ones have blocks of zeros after their own. A token's block follows from its slot: padding in front of it may put
it into another block and change its bits.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.bits import at_least_fp32
from minimodel.errors import InputError
from minimodel.invariant.checks import cancelling, in_tiles, place_does_not_matter, thread_counts, threads
from minimodel.roles import causal_mask

KEY_BLOCK = 256
# sizes of a tile in rows; a query token has one row per head that shares the key/value head. The first size is the
# specification. 2 and 4 fit a decode step of 2 or 4 heads per key/value head.
ROW_TILES = (16, 2, 4, 256)


def blocked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """An attention kernel (`minimodel.attention`): query [B, H, T, D], keys and values [B, H_kv, S, D] -> [B, T, H, D].

    A query that may attend to nothing gives zeros. InputError where no tile size passes its check on this device.
    """
    return blocked_several(query, [(keys, values)], [mask], scaling)


def blocked_several(
    query: Tensor, held: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor | None], scaling: float
) -> Tensor:
    """Attention of several requests of T queries each: query [all B, H, T, D] -> [all B, T, H, D].

    held: keys and values [B, H_kv, S, D] per request. masks: [B or 1, 1, T, S] per request, None for causal attention.
    """
    batch, heads, length, head_dim = query.shape  # all B, H, T, D
    kv_heads = held[0][0].shape[1]
    groups = heads // kv_heads
    tiles = row_tiles(query.dtype, head_dim, query.device, thread_counts())
    tile = next((size for size in tiles if size >= length * groups), tiles[-1])
    tokens = tile // groups  # query tokens per tile
    if tokens == 0:
        raise InputError(
            f"attention kernel blocked: expected at most {tile} query heads per key/value head, found {groups}; "
            "use --attention repeat_kv"
        )
    keys, values = (whole_blocks([pair[i] for pair in held]) for i in (0, 1))  # [blocks, B, H_kv, KEY_BLOCK, D]
    # whatever no mask allows, the padding of the last blocks included: [all B, 1, T, blocks * KEY_BLOCK]
    forbidden = torch.ones(batch, 1, length, len(keys) * KEY_BLOCK, dtype=torch.bool, device=query.device)
    for mine, (own, _), mask in zip(forbidden.split([len(own) for own, _ in held]), held, masks):
        allowed = causal_mask(length, own.shape[2], query.device) if mask is None else mask
        mine[..., : own.shape[2]] = ~allowed
    # -> [blocks, all B, 1, T, 1, KEY_BLOCK]
    forbidden = forbidden.unflatten(-1, (-1, KEY_BLOCK)).permute(3, 0, 1, 2, 4)[:, :, :, :, None]
    # [B, H, T, D] -> [B, H_kv, T, groups, D]: the heads that share a key/value head become neighbouring rows
    query = query.view(batch, kv_heads, groups, length, head_dim).transpose(2, 3)
    parts = []
    for start in range(0, length, tokens):
        part = slice(start, min(start + tokens, length))
        unseen = forbidden[:, :, :, part]  # [blocks, all B, 1, t, 1, KEY_BLOCK]
        blocks = keys.shape[0] if length == 1 else _reach(unseen)  # one token sees its own, the last
        parts.append(_tile(query[:, :, part], keys[:blocks], values[:blocks], unseen[:blocks], tile, scaling))
    # [B, H_kv, T, groups, D] -> [B, T, H, D]
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(batch, length, heads, head_dim)


def whole_blocks(parts: Sequence[Tensor]) -> Tensor:
    """Returns a copy [blocks, all B, H_kv, KEY_BLOCK, D] of the keys or values [B, H_kv, S, D] of each request.

    It is zero after a request's last slot. What a cache holds there could be NaN, and 0 x NaN is NaN.
    """
    _, kv_heads, _, head_dim = parts[0].shape
    blocks = -(-max(part.shape[2] for part in parts) // KEY_BLOCK)
    out = parts[0].new_empty(blocks, sum(map(len, parts)), kv_heads, KEY_BLOCK, head_dim)
    for part, own in zip(parts, out.split([len(part) for part in parts], dim=1)):
        full, rest = divmod(part.shape[2], KEY_BLOCK)
        if full:
            own[:full] = part[:, :, : full * KEY_BLOCK].unflatten(2, (full, KEY_BLOCK)).permute(2, 0, 1, 3, 4)
        if rest:
            own[full, :, :, :rest] = part[:, :, full * KEY_BLOCK :]
        own[full : full + 1, :, :, rest:] = 0  # the rest of the request's last block
        own[full + 1 :] = 0  # blocks that only longer requests have
    return out


def _reach(forbidden: Tensor) -> int:
    """Returns the number of blocks through the last one that a row of the tile may attend to; at least one."""
    seen = (~forbidden.flatten(1).all(dim=1)).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1


def _tile(query: Tensor, keys: Tensor, values: Tensor, forbidden: Tensor, tile: int, scaling: float) -> Tensor:
    """Attention of one tile of rows over blocks of keys: query [B, H_kv, t, groups, D] -> the same shape.

    keys, values [blocks, B, H_kv, KEY_BLOCK, D]; forbidden [blocks, B, 1, t, 1, KEY_BLOCK]; tile >= t * groups rows.
    """
    batch, kv_heads, tokens, groups, head_dim = query.shape
    blocks, pairs, used = keys.shape[0], batch * kv_heads, tokens * groups
    rows = F.pad(query.reshape(1, pairs, used, head_dim), (0, 0, 0, tile - used))  # [1, B * H_kv, tile, D]
    rows = rows.expand(blocks, pairs, tile, head_dim).reshape(blocks * pairs, tile, head_dim)
    scores = torch.bmm(rows, keys.flatten(0, 2).transpose(1, 2))  # [blocks * B * H_kv, tile, KEY_BLOCK]
    # the softmax sees at least FP32; each score was rounded to the model dtype, as in `eager`
    wide = at_least_fp32(query.dtype)
    weights = (scores.to(wide) * scaling).view(blocks, batch, kv_heads, tile, KEY_BLOCK)
    weights[:, :, :, :used].unflatten(3, (tokens, groups)).masked_fill_(forbidden, float("-inf"))
    # [B, H_kv, tile]; a row that may attend to nothing has the lowest finite value, so that its weights are exp(-inf)
    top = weights.amax(dim=-1).amax(dim=0).clamp_(min=torch.finfo(wide).min)
    weights.sub_(top[..., None]).exp_()
    total = add_tree(weights.sum(dim=-1))  # [B, H_kv, tile]
    # the product with the values sees the model dtype; the sum over blocks sees the wide one again
    parts = torch.bmm(weights.to(query.dtype).view(blocks * pairs, tile, KEY_BLOCK), values.flatten(0, 2))
    out = add_tree(parts.to(wide).view(blocks, batch, kv_heads, tile, head_dim))  # [B, H_kv, tile, D]
    # the largest weight of a row is exp(0) = 1, so the clamp changes only the 0/0 of a row that attends to nothing
    out = out / total.clamp_(min=1.0)[..., None]  # [B, H_kv, tile, D]
    # the output projection sees the model dtype
    return out[:, :, :used].to(query.dtype).view(batch, kv_heads, tokens, groups, head_dim)


def add_tree(x: Tensor) -> Tensor:
    """Returns the sum over axis 0 by a binary tree over the index: 2i with 2i + 1, then the same on the results.

    An index without a partner is carried up unchanged, equal to adding 0 except for the sign of a zero; the last step
    makes every zero positive.
    """
    while x.shape[0] > 1:
        even = x.shape[0] // 2 * 2
        pairs = x[0:even:2] + x[1:even:2]
        x = pairs if even == x.shape[0] else torch.cat((pairs, x[even:]))
    return x[0] + 0.0


@lru_cache(maxsize=64)
def row_tiles(dtype: torch.dtype, head_dim: int, device: torch.device, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tile sizes to use, ascending: the first of `ROW_TILES`, and those that give its bits.

    counts: the thread counts of the checks, `thread_counts()`. InputError if the first size fails.
    """
    good = tuple(sorted(tile for tile in ROW_TILES if _keeps_bits(dtype, head_dim, device, tile)))
    if ROW_TILES[0] not in good:
        kind = f"{dtype} on {device}, threads {counts}"
        raise InputError(
            f"attention kernel blocked: expected invariant rows for head size {head_dim}, {kind}, found none; "
            "use --attention repeat_kv"
        )
    return good


def _keeps_bits(dtype: torch.dtype, head_dim: int, device: torch.device, tile: int) -> bool:
    """Returns whether in both products a row has the first tile size's bits at any place, for one block and several."""
    for width, out in ((head_dim, KEY_BLOCK), (KEY_BLOCK, head_dim)):
        x, weight = cancelling(ROW_TILES[-1], width, 6 * out, dtype, device)
        blocks = weight.view(6, out, width).transpose(1, 2)  # [6, width, out], as the scores' product reads the keys
        blocks = blocks if width == head_dim else blocks.contiguous()  # as that of the weights reads the values
        with threads(1):
            alone = [in_tiles(partial(_product, blocks[i : i + 1]), x, ROW_TILES[0]) for i in range(6)]
        for count in (1, 2, 6):
            expected = torch.cat(alone[:count], dim=-1)
            if not place_does_not_matter(partial(_product, blocks[:count]), x, tile, expected):
                return False
    return True


def _product(blocks: Tensor, rows: Tensor) -> Tensor:
    """Returns rows [n, in] times each of k blocks [k, in, out], in one batched call: [n, k * out]."""
    return torch.bmm(rows.expand(len(blocks), *rows.shape).contiguous(), blocks).transpose(0, 1).flatten(1)
