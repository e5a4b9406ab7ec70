"""Each faster form against its specification, in raw bits, over random shapes; what moves bits is the control."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, repeat_kv, repeat_kv_literal
from minimodel.bits import same_bits
from minimodel.layers import apply_rotary, rms_norm, rms_norm_literal, rotary_table, rotate, sign_first_half
from minimodel.roles import zero_dead_rows
from tests.helpers import random_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def attention_case(rng: random.Random, dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries that lie as projections leave them, K/V as a cache gives them, and a mask of one of four kinds."""
    batch, kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 20, 32, 64])
    length = rng.choice([1, 1, 2, 5, 17, 40])
    kind = rng.choice(["none", "causal", "holes", "dead"])
    key_length = length if kind == "none" and length > 1 else length + rng.choice([0, 1, 30, 300])
    query = random_tensor(batch, length, kv_heads * groups, head_dim, dtype=dtype, seed=rng.random_seed())
    room = key_length + rng.choice([0, 3, 40])
    keys, values = (
        random_tensor(batch, kv_heads, room, head_dim, dtype=dtype, seed=rng.random_seed())[:, :, :key_length]
        for _ in "kv"
    )
    query = query.transpose(1, 2)
    if kind == "none":
        return query, keys, values, None
    mask = random_tensor(batch, 1, length, key_length, seed=rng.random_seed()) > 0
    if kind == "causal":
        mask = torch.ones(1, 1, length, key_length, dtype=torch.bool).tril(key_length - length)
    elif kind == "dead":
        mask[:, :, ::3] = False
    return query, keys, values, mask[:1].expand(batch, -1, -1, -1) if rng.random() < 0.5 else mask


class Random(random.Random):
    """A generator that also seeds tensors."""

    def random_seed(self) -> int:
        return self.randrange(1 << 30)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeat_kv_has_the_bits_of_repeated_heads(dtype, threads, fresh_threads):
    torch.set_num_threads(threads)
    rng, moved = Random(f"{dtype}{threads}"), 0
    for groups in (1, 2, 3, 4, 5, 6, 7, 8):
        for _ in range(4):
            query, keys, values, mask = attention_case(rng, dtype, groups)
            scaling = query.shape[-1] ** -0.5
            fast, literal = (f(query, keys, values, mask, scaling) for f in (repeat_kv, repeat_kv_literal))
            assert same_bits(fast.contiguous(), literal.contiguous()), (groups, query.shape, keys.shape)
            other = ATTENTION_KERNELS["eager"](query, keys, values, mask, scaling)
            moved += not same_bits(other.contiguous(), literal.contiguous())
    assert moved > 0, "another order of sums must show, or the comparison sees nothing"


def test_repeat_kv_trains_by_the_repeated_form():
    query, keys = random_tensor(1, 4, 6, 8), random_tensor(1, 2, 6, 8, seed=1)
    gradients = []
    for kernel in (repeat_kv, repeat_kv_literal):
        q, k = query.clone().requires_grad_(), keys.clone().requires_grad_()
        kernel(q, k, k, None, 0.3).square().sum().backward()
        assert k.grad is not None and bool(k.grad.abs().sum() > 0)
        gradients.append(k.grad)
    assert same_bits(*gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_its_single_steps(dtype):
    rng, moved = Random(f"norm{dtype}"), 0
    for width in (8, 36, 64, 100, 256, 896, 1537):
        for rows in ((1, 1), (2, 1), (1, 7), (3, 31)):
            x = random_tensor(*rows, width, dtype=dtype, seed=rng.random_seed()) * rng.choice([0.01, 1, 40])
            weight = random_tensor(width, dtype=dtype, seed=rng.random_seed())
            assert same_bits(rms_norm(x, weight, 1e-6), rms_norm_literal(x, weight, 1e-6)), (rows, width)
            moved += not same_bits(F.rms_norm(x, (width,), weight, 1e-6), rms_norm_literal(x, weight, 1e-6))
    assert moved > 0 or dtype.itemsize >= 4, "torch's norm with a weight rounds in another order"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_has_the_bits_of_apply_rotary(dtype):
    for head_dim in (2, 6, 32, 64, 128):
        cos, sin = (table[None, None, 5:12] for table in rotary_table(12, head_dim, 1e6, dtype))
        x = random_tensor(2, 3, 7, head_dim, dtype=dtype, seed=head_dim)
        x[0, 0, 0, 0], x[0, 0, 0, 1] = 0.0, -0.0
        assert same_bits(rotate(x, cos, sign_first_half(sin)), apply_rotary(x, cos, sin))
        assert not same_bits(rotate(x, cos, sin), apply_rotary(x, cos, sin)), "the control: a sign left out"


def test_dead_rows_are_found_though_only_the_diagonal_is_looked_at_first():
    out = random_tensor(2, 3, 4, 8)
    mask = torch.ones(2, 1, 4, 6, dtype=torch.bool).tril(2)
    assert zero_dead_rows(out, mask) is out
    mask[1, 0, 2] = False
    expected = out.clone()
    expected[1, :, 2] = 0
    assert same_bits(zero_dead_rows(out, mask), expected)
    mask[1, 0, 2, 0] = True  # not itself, but something: alive
    assert same_bits(zero_dead_rows(out, mask), out)
