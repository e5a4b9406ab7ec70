"""Linear kernels: `packed` against F.linear; `tiled` against itself in every call, F.linear being the control."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimodel import packed
from minimodel.bits import same_bits
from minimodel.invariant import linear as tiled
from minimodel.invariant.checks import cancelling, in_tiles, place_does_not_matter
from minimodel.linear import LINEAR_KERNELS, together
from tests.helpers import random_tensor, refused

NARROW = [torch.bfloat16, torch.float16]
DTYPES = [*NARROW, torch.float32, torch.float64]
SHAPES = [(64, 32), (36, 100), (192, 128), (128, 768)]  # out, in
CPU = torch.device("cpu")
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 40, 63, 64, 65, 100, 128, 129, 200, 300]


def require_packing(dtype: torch.dtype) -> None:
    """Skips the test where this process cannot pack weights of `dtype`, naming the reason."""
    if reason := packed.why_not_packed(dtype, CPU):
        pytest.skip(reason)


def weight_and_bias(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random_tensor(*shape, dtype=dtype), random_tensor(shape[0], dtype=dtype, seed=1)


def rows_that_change(function: tiled.Rows, x: Tensor, rows: list[int], seed: int = 0) -> int:
    """How many calls, of some rows of x in some order, give a row other bits than it has alone in a call of two."""
    rng = random.Random(seed)
    expected = in_tiles(function, x, 2)
    changed = 0
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
    assert rows_that_change(LINEAR_KERNELS["tiled"](weight, None), x, ROWS) == 0
    weight, bias = weight_and_bias(shape, dtype)
    x = random_tensor(300, shape[1], dtype=dtype, seed=2)
    function = LINEAR_KERNELS["tiled"](weight, bias)
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
    assert rows_that_change(LINEAR_KERNELS["plain"](weight, None), x, ROWS) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_cancel_show_an_order_that_rounding_hides(dtype):
    """What the checks rest on: two orders of the same terms differ in nearly every output, and every exact sum is 0."""
    x, weight = cancelling(40, 101, 60, dtype, CPU)
    assert not (x.to(torch.float64)[:, None] * weight.to(torch.float64)).sum(-1).abs().gt(1e-3).any()
    forward, backward = (
        F.linear(a, b) for a, b in ((x, weight), (x.flip(1).contiguous(), weight.flip(1).contiguous()))
    )
    share_of_cancelling = (forward != backward).double().mean()
    x, weight = random_tensor(40, 101, dtype=dtype), random_tensor(60, 101, dtype=dtype, seed=1)
    forward, backward = (
        F.linear(a, b) for a, b in ((x, weight), (x.flip(1).contiguous(), weight.flip(1).contiguous()))
    )
    assert share_of_cancelling > 0.5 and share_of_cancelling > (forward != backward).double().mean()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(896, 896), (128, 896), (4864, 896), (896, 4864), (1100, 256), (256, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiled_rows_at_real_shapes(dtype, shape, fresh_threads):
    x, weight = cancelling(1100, shape[1], shape[0], dtype, CPU, seed=9)
    counts = [*range(1, 70), *ROWS[16:], 511, 512, 513, 1024, 1025]
    assert rows_that_change(LINEAR_KERNELS["tiled"](weight, None), x, counts) == 0


def test_a_function_that_looks_at_its_place_is_found_out():
    weight = random_tensor(16, 16, dtype=torch.float64)
    x = random_tensor(64, 16, dtype=torch.float64)

    def by_place(rows):
        out = rows @ weight
        out[5:] = (rows.flip(1) @ weight.flip(0))[5:]  # the same sums, taken from the other end
        return out

    def by_threads(rows):
        out = torch.stack([row @ weight for row in rows])
        return out if torch.get_num_threads() == 1 else out + 0.0 * out + torch.finfo(out.dtype).eps * out

    def honest(rows):
        return torch.stack([(row[:, None] * weight).sum(0) for row in rows])

    assert place_does_not_matter(honest, x, 8, in_tiles(honest, x, 8))
    assert not place_does_not_matter(by_place, x, 8, in_tiles(by_place, x, 8))
    torch.set_num_threads(1)
    assert not place_does_not_matter(by_threads, x, 8, in_tiles(by_threads, x, 8))


def test_tiled_refuses_a_shape_that_nothing_keeps(monkeypatch):
    monkeypatch.setattr(tiled, "place_does_not_matter", lambda *_: False)
    monkeypatch.setattr(tiled, "_PLANS", {})
    with refused("linear kernel tiled", "[64, 32]", "float32", "threads"):
        LINEAR_KERNELS["tiled"](*weight_and_bias((64, 32), torch.float32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NARROW)
def test_packed_has_the_bits_of_plain(dtype, shape, fresh_threads):
    require_packing(dtype)
    x, weight = cancelling(300, shape[1], shape[0], dtype, CPU, seed=9)
    for b in (torch.zeros(shape[0], dtype=dtype), None):
        packed, plain = (LINEAR_KERNELS[name](weight, b) for name in ("packed", "plain"))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert same_bits(packed(x[:rows]), plain(x[:rows])), (rows, threads)
    assert packed(x[:6].view(2, 3, -1)).shape == (2, 3, shape[0])


JOINED = [(64, 32, 32), (36, 36), (96, 20, 4)]  # widths of maps of one input


@pytest.mark.parametrize("widths", JOINED)
@pytest.mark.parametrize("dtype", NARROW)
def test_packed_maps_of_one_input_have_the_bits_they_have_alone(dtype, widths, fresh_threads):
    require_packing(dtype)
    x, weight = cancelling(300, 128, sum(widths), dtype, CPU, seed=9)
    for bias in (torch.zeros(sum(widths), dtype=dtype), random_tensor(sum(widths), dtype=dtype), None):
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        parts = list(zip(weight.split(widths), biases))
        joined, alone = together("packed", parts), [LINEAR_KERNELS["plain"](*part) for part in parts]
        assert isinstance(joined, packed.PackedMaps), "one product"
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                outs = joined(x[:rows])
                assert [out.shape[-1] for out in outs] == list(widths)
                assert all(same_bits(out, one(x[:rows])) for out, one in zip(outs, alone)), (rows, threads)
    first, second = outs[0].clone(), alone[0](x[:rows].flip(0))
    assert not same_bits(first, second), "control: other rows give other bits"
    assert joined(x[:6].view(2, 3, -1))[1].shape == (2, 3, widths[1])


def test_maps_of_one_input_are_taken_alone_where_the_check_fails(monkeypatch):
    require_packing(torch.bfloat16)
    monkeypatch.setattr(packed, "_EQUAL", {})
    monkeypatch.setattr(packed, "same_bits", lambda *_: False)
    weight, bias = weight_and_bias((64, 32), torch.bfloat16)
    parts = list(zip(weight.split(32), bias.split(32)))
    x = random_tensor(2, 32, dtype=torch.bfloat16, seed=2)
    for mine, part in zip(together("packed", parts)(x), parts):
        assert same_bits(mine.contiguous(), F.linear(x, *part))
    monkeypatch.undo()
    joined = together("packed", parts)
    assert isinstance(joined, packed.PackedMaps)


def test_kernels_other_than_packed_take_each_map_alone():
    weight, bias = weight_and_bias((64, 32), torch.float32)
    parts, x = list(zip(weight.split((48, 16)), bias.split((48, 16)))), random_tensor(2, 32, seed=2)
    for kernel in ("plain", "tiled"):
        outs = together(kernel, parts)(x)
        assert all(same_bits(out, LINEAR_KERNELS[kernel](*part)(x)) for out, part in zip(outs, parts))


def test_packed_fp32_is_a_contract_of_its_own():
    weight, bias = weight_and_bias((128, 768), torch.float32)
    x = random_tensor(2, 768, seed=2)
    packed, plain = (LINEAR_KERNELS[name](weight, bias)(x) for name in ("packed", "plain"))
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)
    assert not same_bits(packed, plain)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_packed_weight_comes_back_bit_for_bit(dtype):
    require_packing(dtype)
    weight, _ = weight_and_bias((36, 100), dtype)
    assert same_bits(packed.PackedWeight(weight, None).weight(), weight)


def test_packed_falls_back_to_plain_where_the_check_fails(monkeypatch):
    require_packing(torch.bfloat16)
    monkeypatch.setattr(packed, "_EQUAL", {})
    monkeypatch.setattr(packed, "same_bits", lambda *_: False)
    weight, bias = weight_and_bias((64, 32), torch.bfloat16)
    assert LINEAR_KERNELS["packed"](weight, bias).func is F.linear


def test_without_packing_packed_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(packed, "packing_works", lambda dtype: False)
    for dtype, feature in ((torch.bfloat16, "avx512bw"), (torch.float16, "avx512_fp16"), (torch.float32, "oneDNN")):
        weight, bias = weight_and_bias((64, 32), dtype)
        name = str(dtype).removeprefix("torch.")
        with refused("linear kernel packed", feature, name, "use --linear plain"):
            LINEAR_KERNELS["packed"](weight, bias)
        with refused("linear kernel packed", feature, name):
            together("packed", [(weight, bias), (weight, bias)])


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
def test_without_packing_tiled_rows_still_keep_their_bits(dtype, monkeypatch, fresh_threads):
    monkeypatch.setattr(packed, "packing_works", lambda dtype: False)
    monkeypatch.setattr(tiled, "_PLANS", {})
    x, weight = cancelling(300, 100, 36, dtype, CPU, seed=9)
    function = LINEAR_KERNELS["tiled"](weight, None)
    assert [primitive for primitive, _ in tiled._PLANS.values()] == ["plain"]
    assert rows_that_change(function, x, ROWS) == 0
    assert rows_that_change(by_count, x, ROWS) > 0, "control: a kernel that sums by the number of rows"


def by_count(rows: Tensor) -> Tensor:
    """A function whose rows get other bits in calls of more than two."""
    out = rows[:, :36] * 1.5
    return out if len(rows) == 2 else -out


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
        LINEAR_KERNELS["packed"](random_tensor(4, 4, dtype=torch.float64), None)
    with refused("linear kernel packed", "training"):
        LINEAR_KERNELS["packed"](random_tensor(4, 4).requires_grad_(), None)
