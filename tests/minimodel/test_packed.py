"""Linear kernels: `packed` against F.linear; `tiled` against itself in every call, F.linear being the control."""

import random

import pytest
import torch
import torch.nn.functional as F

from minimodel import packed
from minimodel.bits import same_bits
from minimodel.invariant import linear as tiled
from minimodel.invariant.checks import cancelling, in_tiles, place_does_not_matter
from minimodel.linear import LINEAR_KERNELS, Plain
from tests.helpers import DTYPES, random_tensor, refused

NARROW = DTYPES[:2]
SHAPES = [(64, 32), (36, 100), (128, 768)]  # out, in
CPU = torch.device("cpu")
ROWS = [1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 129, 300]


def require_packing(dtype):
    """Skips the test where this process cannot pack weights of `dtype`, naming the reason."""
    if reason := packed.why_not_packed(dtype, CPU):
        pytest.skip(reason)


def linear(kernel, weight, bias=None):
    """One map alone under a kernel."""
    maps = LINEAR_KERNELS[kernel]([(weight, bias)])
    return lambda x: maps(x)[0]


def weight_and_bias(shape, dtype):
    return random_tensor(*shape, dtype=dtype), random_tensor(shape[0], dtype=dtype, seed=1)


def rows_that_change(function, x, rows):
    """How many calls, of some rows of x in some order, give a row other bits than it has alone in a call of two."""
    rng, expected, changed = random.Random(0), in_tiles(function, x, 2), 0
    for count in rows:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            chosen = torch.tensor(rng.sample(range(len(x)), count))
            changed += not same_bits(function(x[chosen]), expected[chosen])
    return changed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiled_rows_keep_their_bits_in_any_call(dtype, shape, fresh_threads):
    x, weight = cancelling(300, shape[1], shape[0], dtype, CPU, seed=9)
    assert rows_that_change(linear("tiled", weight), x, ROWS) == 0
    weight, bias = weight_and_bias(shape, dtype)
    x, function = random_tensor(300, shape[1], dtype=dtype, seed=2), linear("tiled", weight, bias)
    assert rows_that_change(function, x, ROWS) == 0
    whole = function(x.view(3, 100, -1))
    assert whole.shape == (3, 100, shape[0]) and same_bits(whole.view(300, -1), function(x))
    assert same_bits(function(x[:6].view(2, 3, -1)[:, -1:]).view(2, -1), function(x)[[2, 5]]), "strided rows"
    assert same_bits(function(x.view(-1)[shape[1] :].view(299, -1)), function(x)[1:]), "rows at an odd address"
    exact = x.double() @ weight.double().T + bias.double()
    rounding = torch.finfo(dtype).eps * shape[1] ** 0.5  # sums of `in` terms, one rounding each
    assert float((function(x).double() - exact).abs().max()) <= rounding * float(exact.abs().max())


def test_plain_rows_do_not_keep_theirs(fresh_threads):
    """The control: in FP32 the same test fails for F.linear."""
    x, weight = cancelling(300, 768, 128, torch.float32, CPU, seed=9)
    assert rows_that_change(linear("plain", weight), x, ROWS) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_cancel_show_an_order_that_rounding_hides(dtype):
    """What the checks rest on: two orders of the same terms differ in nearly every output, and every exact sum is 0."""

    def share_that_differs(x, weight):
        return (F.linear(x, weight) != F.linear(x.flip(1).contiguous(), weight.flip(1).contiguous())).double().mean()

    x, weight = cancelling(40, 101, 60, dtype, CPU)
    assert not (x.double()[:, None] * weight.double()).sum(-1).abs().gt(1e-3).any()
    ordinary = share_that_differs(random_tensor(40, 101, dtype=dtype), random_tensor(60, 101, dtype=dtype, seed=1))
    assert share_that_differs(x, weight) > max(0.5, ordinary)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(896, 896), (128, 896), (4864, 896), (896, 4864), (1100, 256), (256, 512)])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_tiled_rows_at_real_shapes(dtype, shape, fresh_threads):
    x, weight = cancelling(1100, shape[1], shape[0], dtype, CPU, seed=9)
    counts = [*range(1, 70), 100, 128, 129, 200, 300, 511, 512, 513, 1024, 1025]
    assert rows_that_change(linear("tiled", weight), x, counts) == 0


def test_a_function_that_looks_at_its_place_is_found_out(fresh_threads):
    x, weight = (random_tensor(count, 16, dtype=torch.float64) for count in (64, 16))

    def by_place(rows):
        out = rows @ weight
        out[5:] = (rows.flip(1) @ weight.flip(0))[5:]  # the same sums, taken from the other end
        return out

    def by_threads(rows):
        out = honest(rows)
        return out if torch.get_num_threads() == 1 else out + torch.finfo(out.dtype).eps * out

    def by_padding(rows):
        return honest(rows) * torch.where((rows == 0).all(1).any(), 2.0, 1.0)

    def honest(rows):
        return torch.stack([(row[:, None] * weight).sum(0) for row in rows])

    for function, holds in ((honest, True), (by_place, False), (by_threads, False), (by_padding, False)):
        torch.set_num_threads(1)
        assert place_does_not_matter(function, x, 8, in_tiles(function, x, 8)) == holds


def test_tiled_refuses_a_shape_that_nothing_keeps(monkeypatch):
    monkeypatch.setattr(tiled, "place_does_not_matter", lambda *_: False)
    monkeypatch.setattr(tiled, "_PLANS", {})
    with refused("linear kernel tiled", "[64, 32]", "float32", "threads"):
        linear("tiled", *weight_and_bias((64, 32), torch.float32))


@pytest.mark.parametrize("widths", [(64,), (36,), (192,), (64, 32, 32), (36, 36), (96, 20, 4)])  # of maps of one input
@pytest.mark.parametrize("dtype", NARROW)
def test_packed_maps_have_the_bits_of_plain_ones(dtype, widths, fresh_threads):
    require_packing(dtype)
    x, weight = cancelling(300, 100, sum(widths), dtype, CPU, seed=9)
    for bias in (torch.zeros(sum(widths), dtype=dtype), random_tensor(sum(widths), dtype=dtype), None):
        parts = list(zip(weight.split(widths), [None] * len(widths) if bias is None else bias.split(widths)))
        joined, plain = LINEAR_KERNELS["packed"](parts), Plain(parts)
        counts = packed.equal_counts(weight, bias, widths, packed.ONE_REQUEST)
        assert isinstance(joined, packed.Packed) == bool(counts), "one product where the check passes"
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                outs = joined(x[:rows])
                assert [out.shape[-1] for out in outs] == list(widths)
                assert all(map(same_bits, map(torch.clone, outs), plain(x[:rows]))), (rows, threads)
    assert not same_bits(outs[0].clone(), plain(x[:rows].flip(0))[0]), "control: other rows give other bits"
    assert joined(x[:6].view(2, 3, -1))[-1].shape == (2, 3, widths[-1])


def test_packed_is_plain_where_the_check_fails(monkeypatch):
    require_packing(torch.bfloat16)
    parts = [weight_and_bias((64, 32), torch.bfloat16)] * 2
    for passes in (False, True):  # the second is the control
        monkeypatch.setattr(packed, "_EQUAL", {})
        monkeypatch.setattr(packed, "same_bits", lambda *_, passes=passes: passes)
        assert isinstance(LINEAR_KERNELS["packed"](parts), packed.Packed if passes else Plain)


def test_packed_fp32_has_its_own_bits():
    weight, bias = weight_and_bias((128, 768), torch.float32)
    x = random_tensor(2, 768, seed=2)
    mine, plain = (linear(name, weight, bias)(x) for name in ("packed", "plain"))
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
    assert not same_bits(mine, plain)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_packed_weight_comes_back_bit_for_bit(dtype):
    require_packing(dtype)
    weight, _ = weight_and_bias((36, 100), dtype)
    assert same_bits(packed.PackedWeight(weight, None).weight(), weight)


@pytest.mark.parametrize(("dtype", "feature"), [*zip(DTYPES[:3], ("avx512bw", "avx512_fp16", "oneDNN"))])
def test_without_packing_packed_is_refused_and_tiled_rows_still_keep_their_bits(
    dtype, feature, monkeypatch, fresh_threads
):
    monkeypatch.setattr(packed, "packing_works", lambda dtype: False)
    monkeypatch.setattr(tiled, "_PLANS", {})
    part, name = weight_and_bias((64, 32), dtype), str(dtype).removeprefix("torch.")
    with refused("linear kernel packed", feature, name, "use --linear plain"):
        LINEAR_KERNELS["packed"]([part, part])
    x, weight = cancelling(300, 100, 36, dtype, CPU, seed=9)
    function = linear("tiled", weight)
    assert [primitive for primitive, _ in tiled._PLANS.values()] == ["plain"]
    assert rows_that_change(function, x, ROWS) == 0

    def by_count(rows):
        return rows * (1.5 if len(rows) == 2 else -1.5)

    assert rows_that_change(by_count, x, ROWS) > 0, "control: other bits in calls of more than two rows"


def test_the_trial_of_packing_reports_what_onednn_refuses(monkeypatch):
    trial = packed.packing_works.__wrapped__
    assert not trial(torch.float64), "oneDNN packs no FP64 weight on any CPU"
    assert trial(torch.float32) == torch.backends.mkldnn.is_available()

    class Wrong(packed.PackedWeight):
        def __call__(self, rows):
            return -super().__call__(rows)

    monkeypatch.setattr(packed, "PackedWeight", Wrong)
    assert not trial(torch.float32), "a product with wrong values is no packing that works"


def test_packed_refuses_what_cannot_be_packed():
    with refused("linear kernel packed", "float64", "--linear plain"):
        linear("packed", random_tensor(4, 4, dtype=torch.float64))
    with refused("linear kernel packed", "training"):
        linear("packed", random_tensor(4, 4).requires_grad_())
