"""How many requests may step together: what holds here, and a kernel that breaks it on purpose."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decode import independence
from decode.independence import LARGEST, row_counts_equal, together_here
from decode.together import OneCallEach, Pairs, shape_of, taking
from minimodel import load_model
from minimodel.bits import same_bits
from minimodel.invariant.checks import cancelling
from minimodel.linear import LINEAR_KERNELS, Plain
from tests.conftest import numeric

CPU = torch.device("cpu")


def in_other_order_from(count: int) -> Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]:
    """A linear kernel that sums its products in halves in calls of `count` rows and more."""

    def kernel(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            if x.numel() // x.shape[-1] < count:
                return F.linear(x, weight, bias)
            return F.linear(x[..., :half], weight[:, :half], bias) + F.linear(x[..., half:], weight[:, half:])

        return run

    return kernel


@pytest.mark.parametrize(("count", "size"), [(4, 1), (6, 2), (32, 15), (34, 16)])
def test_the_count_at_which_rows_change_is_found(count, size):
    x = torch.randn(2 * LARGEST, 8, generator=torch.Generator().manual_seed(3))
    assert row_counts_equal(lambda part: part * 3 + float(len(part) >= count), x) == size


def test_a_function_of_each_row_alone_holds_at_every_count():
    x = torch.randn(2 * LARGEST, 1, 24, generator=torch.Generator().manual_seed(1))
    assert row_counts_equal(lambda part: part.abs().sqrt(), x) == LARGEST
    assert row_counts_equal(lambda part: part - part.sum(), x) == 1, "the control: rows that depend on the call"


def test_a_function_of_a_rows_place_is_seen():
    """Each pair has its own bits in order, and others where the pairs are turned round."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    place = lambda part: torch.cat([part[:4], part[4:] + 1])  # noqa: E731
    assert row_counts_equal(place, x) == 2


def test_a_linear_kernel_whose_bits_depend_on_the_row_count_is_refused(tiny_directory, monkeypatch):
    monkeypatch.setitem(LINEAR_KERNELS, "plain", in_other_order_from(4))
    found = together_here(load_model(tiny_directory, numeric("bf16")))
    assert found.size == 1 and found.limit.endswith(("map, 4 rows", "maps, 4 rows"))


def test_a_norm_whose_bits_depend_on_the_row_count_is_refused(bf16, monkeypatch):
    real = independence.rms_norm

    def altered(x, weight, eps):
        return real(x, weight, eps) if len(x) < 10 else -real(x, weight, eps)

    monkeypatch.setattr(independence, "rms_norm", altered)
    monkeypatch.setattr(independence, "_KNOWN", {})
    found = together_here(bf16)
    assert found.size <= 4 and (found.size < 4 or found.limit == "the norm, 10 rows")


def test_a_batch_that_mixes_its_requests_is_refused(bf16, monkeypatch):
    """Every part holds, and the layer does not: the one check that runs the step itself."""
    real = independence.step_together

    def mixed(model, requests, observe):
        return real(model, [requests[1], requests[0], *requests[2:]], observe)

    monkeypatch.setattr(independence, "step_together", mixed)
    monkeypatch.setattr(independence, "_KNOWN", {})
    found = together_here(bf16)
    assert found.size == 1 and found.limit.endswith("one whole layer, 4 rows")


def test_fewer_are_found_where_fewer_are_asked_for(bf16):
    assert together_here(bf16, 2).size <= 2


@pytest.mark.parametrize("biased", [False, True])
def test_pairs_are_linear_maps_of_two_rows(biased):
    x, weight = cancelling(12, 96, 40, torch.float32, CPU)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1)) if biased else None
    pairs, plain = Pairs(weight, bias), Plain(weight, bias)
    assert same_bits(pairs(x[:2, None]), plain(x[:2, None])), "one pair is one product of two rows"
    assert pairs(x[:, None]).shape == plain(x[:, None]).shape
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    scale = F.linear(x.double().abs(), weight.double().abs()).max()
    assert float((pairs(x[:, None])[:, 0].double() - exact).abs().max() / scale) < 1e-6


def test_ways_share_every_weight(fp32):
    head = fp32.lm_head
    assert isinstance(head, Plain)
    maps = [layer.o_proj for layer in fp32.layers] + [layer.down_proj for layer in fp32.layers] + [head]
    joints = [joint for layer in fp32.layers for joint in (layer.qkv_proj, layer.gate_up_proj)]
    shapes = {shape_of(linear) for linear in (*maps, *(each for joint in joints for each in joint.maps))}
    other = taking(fp32, dict.fromkeys(shapes, OneCallEach))
    assert isinstance(other.lm_head, OneCallEach) and other.lm_head.weight is head.weight
    assert fp32.lm_head is head, "the model itself stays as it was"
    assert all(isinstance(layer.o_proj, OneCallEach) for layer in other.layers)
    assert all(isinstance(each, OneCallEach) for layer in other.layers for each in layer.qkv_proj.maps)
    assert taking(fp32, {}) is fp32


def test_a_plain_map_whose_rows_change_in_one_call_takes_another_way(monkeypatch):
    """Where F.linear itself sums four rows in another order, every pair still gets the bits of two."""
    real = F.linear

    def altered(x, weight, bias=None):
        return real(x, weight, bias) if x.numel() // x.shape[-1] < 4 else real(x, weight, bias) * (1 + 2**-20)

    _, weight = cancelling(2, 64, 48, torch.float32, CPU)
    linear = Plain(weight, None)
    monkeypatch.setattr(F, "linear", altered)
    way = independence._way(linear, 4)
    assert way in (Pairs, OneCallEach)
    x = torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(4))
    assert not same_bits(linear(x), torch.cat([linear(pair) for pair in x.split(2)])), "the control"
    assert same_bits(way(weight, None)(x), torch.cat([linear(pair.clone()) for pair in x.split(2)]))


def test_a_head_too_large_to_be_made_twice_is_tried_itself(bf16, monkeypatch):
    """The trial layer then has a small head, of a shape that no map of the model has."""
    monkeypatch.setattr(independence, "LARGE", bf16.config.vocab_size * bf16.config.hidden_size - 1)
    monkeypatch.setattr(independence, "FEW_TOKENS", 40)
    monkeypatch.setattr(independence, "_KNOWN", {})
    tried = []
    real = independence.row_counts_equal

    def watched(function, x):
        tried.append(function(x[:2]))
        return real(function, x)

    monkeypatch.setattr(independence, "row_counts_equal", watched)
    assert together_here(bf16).size >= 1
    assert bf16.config.vocab_size in {out.shape[-1] for out in tried}
