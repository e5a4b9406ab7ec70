"""`blocked` attention: a row's bits whatever the rest of the batch, its mathematics; SDPA is the control."""

import random

import pytest
import torch
import torch.nn.functional as F

from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import same_bits
from minimodel.invariant import attention
from minimodel.invariant.attention import KEY_BLOCK, ROW_TILES, add_tree, blocked, blocked_several
from tests.helpers import DTYPES, random_tensor, refused

EDGES = [1, 2, 15, 16, 17, 255, 256, 257, 300]
FAR_EDGES = [511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049]
CHUNKS = [1, 1, 1, 2, 3, 8, 16, 17, 33, 129, 256, 257]


class Case:
    """One sequence of `length` tokens: queries, K/V in a longer cache full of NaN, a mask with holes, dead rows."""

    def __init__(self, dtype, length, groups, seed):
        rng = random.Random(seed)
        kv_heads, head_dim = rng.choice([1, 2]), rng.choice([16, 32, 64])
        self.length, self.scaling = length, head_dim**-0.5
        self.query = random_tensor(2, length, kv_heads * groups, head_dim, dtype=dtype, seed=seed).transpose(1, 2)
        stored = torch.full((2, 2, kv_heads, length + 9, head_dim), float("nan"), dtype=dtype)
        self.keys, self.values = stored[..., :length, :]
        for tensor, offset in ((self.keys, 1), (self.values, 2)):
            tensor.copy_(random_tensor(2, kv_heads, length, head_dim, dtype=dtype, seed=seed + offset))
        mask = (random_tensor(1, 1, length, length, seed=seed + 3) > -0.7).tril()
        mask[:, :, rng.randrange(length)] = False
        self.mask = mask.expand(2, -1, -1, -1)

    def rows(self, kernel, start, stop, copies=slice(None), more=0):
        """Tokens start to stop - 1 of `copies`, beside the keys of `more` later, forbidden tokens."""
        keys = slice(0, min(stop + more, self.length))
        given = self.query[copies, :, start:stop], self.keys[copies, :, keys], self.values[copies, :, keys]
        return kernel(*given, self.mask[copies, :, start:stop, keys], self.scaling).contiguous()


def changed(kernel, case, rng, tries):
    """How many random cuts of the case give a token other bits than one call of everything gives it."""
    torch.set_num_threads(1)
    whole, found = case.rows(kernel, 0, case.length), 0
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
    assert changed(blocked, Case(dtype, length, rng.randint(1, 8), seed=length), rng, tries=8) == 0


@pytest.mark.parametrize("groups", range(1, 9))
def test_rows_keep_their_bits_across_three_blocks(groups, fresh_threads):
    assert changed(blocked, Case(torch.bfloat16, 2 * KEY_BLOCK + 9, groups, seed=groups), random.Random(groups), 3) == 0


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

    def holds():
        return same_bits(*(case.rows(blocked, short - 1, short, more=more) for more in (0, 300)))

    assert holds()
    monkeypatch.setattr(attention, "add_tree", halves)
    monkeypatch.setattr(attention, "_reach", lambda forbidden: len(forbidden))
    assert not holds()


@pytest.mark.parametrize("blocks", range(1, 12))
def test_further_zero_blocks_change_nothing_in_a_tree(blocks):
    x = random_tensor(blocks, 5, 7, seed=blocks)
    x[:, 0] = -0.0
    for more in range(1, 9):
        assert same_bits(add_tree(torch.cat((x, torch.zeros(more, 5, 7)))), add_tree(x))
    torch.testing.assert_close(add_tree(x), x.sum(0))
    if blocks > 2:
        assert not same_bits(add_tree(torch.cat((torch.zeros(1, 5, 7), x))), add_tree(x)), "the index must count"


def several_and_alone(several, alone, dtype, lengths, groups):
    """Whether the last token of each of several requests has the bits in one call that it has alone."""
    case = Case(dtype, max(lengths), groups, seed=11)
    queries = [case.query[:, :, n - 1 : n] for n in lengths]
    held = [(case.keys[:, :, :n], case.values[:, :, :n]) for n in lengths]
    masks = [case.mask[:, :, n - 1 : n, :n] for n in lengths]
    found = several(torch.cat(queries), held, masks, case.scaling).split(len(case.query))
    each = [alone(query, *pair, mask, case.scaling) for query, pair, mask in zip(queries, held, masks)]
    return [same_bits(mine.contiguous(), own.contiguous()) for mine, own in zip(found, each)]


LENGTHS = [3, 40, 255, 256, 257, 300, 511, 600, 1030]


@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_of_one_call_keep_the_bits_they_have_alone(dtype, groups, fresh_threads):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(several_and_alone(blocked_several, blocked, dtype, LENGTHS, groups))


def test_requests_padded_to_one_length_do_not_keep_theirs_under_sdpa():
    """The control: zeros behind the shorter requests and a mask, under the default kernel."""
    sdpa = ATTENTION_KERNELS["repeat_kv"]

    def padded(query, held, masks, scaling):
        keys, values = (
            torch.cat([F.pad(pair[i], (0, 0, 0, LENGTHS[-1] - pair[i].shape[2])) for pair in held]) for i in (0, 1)
        )
        mask = torch.cat([F.pad(one, (0, LENGTHS[-1] - one.shape[-1])) for one in masks])
        return sdpa(query, keys, values, mask, scaling)

    equal = [several_and_alone(padded, sdpa, dtype, LENGTHS, 2) for dtype in (torch.bfloat16, torch.float32)]
    assert not all(map(all, equal))


@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_a_tile_size_is_used_only_where_it_gives_the_first_ones_bits(dtype, monkeypatch):
    device, real = torch.device("cpu"), attention.place_does_not_matter
    found = attention.row_tiles(dtype, 64, device, (1, 2))
    assert ROW_TILES[0] in found and list(found) == sorted(found) and set(found) <= set(ROW_TILES)
    attention.row_tiles.cache_clear()
    monkeypatch.setattr(
        attention, "place_does_not_matter", lambda f, x, tile, expected: tile != 4 and real(f, x, tile, expected)
    )
    assert attention.row_tiles(dtype, 64, device, (1, 2)) == tuple(tile for tile in found if tile != 4)
    attention.row_tiles.cache_clear()


@pytest.mark.parametrize("length", [1, 40, 256, 300, 600])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_mathematics_of_eager_in_fp64(length, groups):
    case = Case(torch.float64, length, groups, seed=length + groups)
    mine, exact = (case.rows(ATTENTION_KERNELS[name], 0, length) for name in ("blocked", "eager"))
    torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-13)
    dead = ~case.mask[0, 0].any(dim=-1)
    assert bool(dead.any()) and not mine[:, dead].any(), "a row that may attend to nothing gives zeros"


@pytest.mark.parametrize(
    ("name", "value", "heads", "parts"),
    [
        ("ROW_TILES", (16,), 17, ("at most 16", "17")),
        ("place_does_not_matter", lambda *_: False, 2, ("head size 8", "float32")),  # a device that keeps no tile
    ],
)
def test_what_no_tile_holds_is_refused(monkeypatch, name, value, heads, parts):
    monkeypatch.setattr(attention, name, value)
    attention.row_tiles.cache_clear()
    with refused("attention kernel blocked", *parts):
        blocked(random_tensor(1, heads, 1, 8), random_tensor(1, 1, 1, 8), random_tensor(1, 1, 1, 8), None, 0.3)
    attention.row_tiles.cache_clear()
