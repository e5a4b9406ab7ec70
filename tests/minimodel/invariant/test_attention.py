"""`blocked` attention: a row's bits in every company, its mathematics; SDPA and a crooked tree are the controls."""

import random

import pytest
import torch
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, Attention
from minimodel.bits import same_bits
from minimodel.invariant import attention
from minimodel.invariant.attention import KEY_BLOCK, add_tree, blocked, whole_blocks
from tests.helpers import random_tensor, refused

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
EDGES = [1, 2, 15, 16, 17, 255, 256, 257, 300]
FAR_EDGES = [511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049]
CHUNKS = [1, 1, 1, 2, 3, 8, 16, 17, 33, 129, 256, 257]


class Case:
    """One sequence of `length` tokens: queries, K/V in a longer cache full of NaN, a mask with holes, dead rows."""

    def __init__(self, dtype: torch.dtype, length: int, groups: int, seed: int) -> None:
        rng = random.Random(seed)
        self.batch, kv_heads, head_dim = 2, rng.choice([1, 2]), rng.choice([16, 32, 64])
        self.length, self.scaling = length, head_dim**-0.5
        query = random_tensor(self.batch, length, kv_heads * groups, head_dim, dtype=dtype, seed=seed)
        self.query = query.transpose(1, 2)
        self.keys, self.values = (self._cached(kv_heads, head_dim, dtype, seed + i) for i in (1, 2))
        mask = (random_tensor(1, 1, length, length, seed=seed + 3) > -0.7).tril()
        mask[:, :, rng.randrange(length)] = False
        self.mask = mask.expand(self.batch, -1, -1, -1)

    def _cached(self, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
        room = torch.full((self.batch, kv_heads, self.length + 9, head_dim), float("nan"), dtype=dtype)
        room[:, :, : self.length] = random_tensor(self.batch, kv_heads, self.length, head_dim, dtype=dtype, seed=seed)
        return room[:, :, : self.length]

    def rows(self, kernel: Attention, start: int, stop: int, copies: slice = slice(None), more: int = 0) -> Tensor:
        """Tokens start to stop - 1 of `copies`, beside the keys of `more` later, forbidden tokens."""
        keys = slice(0, min(stop + more, self.length))
        mask = self.mask[copies, :, start:stop, keys]
        query = self.query[copies, :, start:stop]
        return kernel(query, self.keys[copies, :, keys], self.values[copies, :, keys], mask, self.scaling).contiguous()


def changed(kernel: Attention, case: Case, rng: random.Random, tries: int) -> int:
    """How many random cuts of the case give a token other bits than one call of everything gives it."""
    torch.set_num_threads(1)
    whole = case.rows(kernel, 0, case.length)
    found = 0
    for _ in range(tries):
        torch.set_num_threads(rng.choice([1, 2]))
        start = rng.choice([rng.randrange(case.length), case.length - 1])
        stop = min(case.length, start + rng.choice(CHUNKS))
        copies = rng.choice([slice(0, 1), slice(1, 2), slice(0, 2)])
        part = case.rows(kernel, start, stop, copies, more=rng.choice([0, 0, 5, 400]))
        found += not same_bits(part, whole[copies, start:stop].contiguous())
    return found


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_however_the_call_is_cut(dtype, length, fresh_threads):
    rng = random.Random(f"{dtype}{length}")
    for groups in (rng.randint(1, 4), rng.randint(5, 8)):
        assert changed(blocked, Case(dtype, length, groups, seed=length * 10 + groups), rng, tries=8) == 0


@pytest.mark.parametrize("groups", range(1, 9))
def test_rows_keep_their_bits_across_three_blocks(groups, fresh_threads):
    assert changed(blocked, Case(torch.bfloat16, 2 * KEY_BLOCK + 9, groups, seed=groups), random.Random(groups), 5) == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [*range(1, 301), *FAR_EDGES])
def test_rows_keep_their_bits_at_every_length(length, fresh_threads):
    rng = random.Random(length)
    for dtype in DTYPES:
        assert changed(blocked, Case(dtype, length, rng.randint(1, 8), seed=length), rng, tries=6) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sdpa_rows_do_not_keep_theirs(dtype, fresh_threads):
    """The control: the default kernel fails the same test."""
    rng = random.Random(7)
    cases = [Case(dtype, length, 2, seed=length) for length in (257, 300)]
    assert sum(changed(ATTENTION_KERNELS["repeat_kv"], case, rng, 8) for case in cases) > 0


def test_a_crooked_tree_is_found_out(monkeypatch, fresh_threads):
    """The control: blocks added in two halves of what is there, a tree that is not tied to the absolute index."""

    def halves(x):
        return x[0] if len(x) == 1 else halves(x[: len(x) // 2]) + halves(x[len(x) // 2 :])

    case = Case(torch.float32, 3 * KEY_BLOCK + 40, 2, seed=5)
    short = 2 * KEY_BLOCK + 60  # three blocks, or four when the call also holds later keys
    alone, beside = (case.rows(blocked, short - 1, short, more=more) for more in (0, 300))
    assert same_bits(alone, beside)
    monkeypatch.setattr(attention, "add_tree", halves)
    monkeypatch.setattr(attention, "_reach", lambda forbidden: len(forbidden))
    alone, beside = (case.rows(blocked, short - 1, short, more=more) for more in (0, 300))
    assert not same_bits(alone, beside)


@pytest.mark.parametrize("blocks", range(1, 12))
def test_further_zero_blocks_change_nothing_in_a_tree(blocks):
    x = random_tensor(blocks, 5, 7, seed=blocks)
    x[:, 0] = -0.0
    for more in range(1, 9):
        assert same_bits(add_tree(torch.cat((x, torch.zeros(more, 5, 7)))), add_tree(x))
    torch.testing.assert_close(add_tree(x), x.sum(0))
    if blocks > 2:
        assert not same_bits(add_tree(torch.cat((torch.zeros(1, 5, 7), x))), add_tree(x)), "the index must count"


def test_blocks_hold_the_keys_and_zeros():
    x = random_tensor(2, 3, KEY_BLOCK + 5, 4)
    held = whole_blocks(x)
    assert held.shape == (2, 2, 3, KEY_BLOCK, 4)
    flat = held.permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert same_bits(flat[:, :, : KEY_BLOCK + 5].contiguous(), x) and not flat[:, :, KEY_BLOCK + 5 :].any()


@pytest.mark.parametrize("length", [1, 40, 256, 300, 600])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_mathematics_of_eager_in_fp64(length, groups):
    case = Case(torch.float64, length, groups, seed=length + groups)
    mine, exact = (case.rows(ATTENTION_KERNELS[name], 0, length) for name in ("blocked", "eager"))
    torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-13)
    dead = ~case.mask[0, 0].any(dim=-1)
    assert bool(dead.any()) and not mine[:, dead].any(), "a row that may attend to nothing gives zeros"


def test_more_heads_a_group_than_a_tile_holds_are_refused(monkeypatch):
    monkeypatch.setattr(attention, "ROW_TILES", (16,))
    attention.row_tiles.cache_clear()
    with refused("attention kernel blocked", "at most 16", "17"):
        blocked(random_tensor(1, 17, 1, 8), random_tensor(1, 1, 1, 8), random_tensor(1, 1, 1, 8), None, 0.3)
    attention.row_tiles.cache_clear()


def test_a_device_that_keeps_no_tile_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "place_does_not_matter", lambda *_: False)
    attention.row_tiles.cache_clear()
    with refused("attention kernel blocked", "head size 8", "float32"):
        blocked(random_tensor(1, 2, 1, 8), random_tensor(1, 1, 1, 8), random_tensor(1, 1, 1, 8), None, 0.3)
    attention.row_tiles.cache_clear()
