"""How many requests may step together: what holds here, and a kernel that breaks it on purpose."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from decode import independence
from decode.independence import LARGEST, row_counts_equal, together_here
from decode.together import OneCallEach, Pairs, shape_of, taking
from minimodel import load_model, packed
from minimodel.attention import SEVERAL_KERNELS
from minimodel.bits import same_bits
from minimodel.invariant.attention import blocked_several
from minimodel.invariant.checks import cancelling
from minimodel.linear import LINEAR_KERNELS, Plain
from minimodel.packed import PackedWeight
from tests.conftest import numeric
from tests.helpers import random_tensor

CPU = torch.device("cpu")
MAPS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("function", "rows", "size"),
    [
        *(
            (lambda part, at=at: part * 3 + float(len(part) >= at), None, size)
            for at, size in ((4, 1), (6, 2), (32, 15))
        ),
        (lambda part: part * 3 + float(len(part) >= 34), None, 16),
        (lambda part: part.abs().sqrt(), None, LARGEST),
        (lambda part: part - part.sum(), None, 1),  # the control of the line above: rows that depend on the call
        # each pair has its own bits in order, and others where the pairs are turned round
        (lambda part: torch.cat([part[:4], part[4:] + 1]), 8, 2),
    ],
)
def test_the_count_at_which_rows_change_is_found(function, rows, size):
    assert row_counts_equal(function, random_tensor(rows or 2 * LARGEST, 1, 24, seed=3)) == size


def in_halves_from_four_rows(parts):
    """A linear kernel that sums its products in halves in calls of four rows and more."""

    def run(x):
        half = x.shape[-1] // 2
        if x.numel() // x.shape[-1] < 4:
            return [F.linear(x, *part) for part in parts]
        return [F.linear(x[..., :half], w[:, :half], b) + F.linear(x[..., half:], w[:, half:]) for w, b in parts]

    return run


def test_a_linear_kernel_whose_bits_depend_on_the_row_count_is_refused(tiny_directory, monkeypatch):
    monkeypatch.setitem(LINEAR_KERNELS, "plain", in_halves_from_four_rows)
    found = together_here(load_model(tiny_directory, numeric("bf16")))
    assert found.size == 1 and found.limit.endswith(("proj, 4 rows", "lm_head, 4 rows"))


@pytest.fixture
def unknown(monkeypatch):
    """Nothing that was found before is remembered; replaces a function by what `make` makes of it."""
    monkeypatch.setattr(independence, "_KNOWN", {})

    def replace(name, make):
        monkeypatch.setattr(independence, name, make(getattr(independence, name)))

    return replace


def test_a_norm_whose_bits_depend_on_the_row_count_is_refused(bf16, unknown):
    unknown("rms_norm", lambda real: lambda x, *more: real(x, *more) if len(x) < 10 else -real(x, *more))
    found = together_here(bf16)
    assert found.size <= 4 and (found.size < 4 or found.limit == "the norm, 10 rows")


def test_a_batch_that_mixes_its_requests_is_refused(bf16, unknown):
    """Every part holds, and the layer does not: the one check that runs the step itself."""
    unknown(
        "step_together", lambda real: lambda model, given, *more: real(model, [given[1], given[0], *given[2:]], *more)
    )
    found = together_here(bf16)
    assert found.size == 1 and found.limit.endswith("one whole layer, 4 rows")


@pytest.mark.parametrize("biased", [False, True])
def test_pairs_are_linear_maps_of_two_rows(biased):
    x, weight = cancelling(12, 96, 40, torch.float32, CPU)
    part = weight, random_tensor(40) if biased else None
    pairs, plain = Pairs([part] * 2), Plain([part])
    assert same_bits(pairs(x[:2, None])[1], plain(x[:2, None])[0]), "one pair is one product of two rows"
    found = pairs(x[:, None])[0]
    exact = F.linear(x.double(), *(None if one is None else one.double() for one in part))
    scale = F.linear(x.double().abs(), weight.double().abs()).max()
    assert found.shape == (12, 1, 40) and float((found[:, 0].double() - exact).abs().max() / scale) < 1e-6


def test_ways_share_every_weight(fp32):
    def maps(model):
        return [model.lm_head, *(getattr(layer, name) for layer in model.layers for name in MAPS)]

    other = taking(fp32, {shape_of(one): OneCallEach for one in maps(fp32)})
    assert all(type(one) is Plain for one in maps(fp32)), "the model itself stays as it was"
    assert all(type(one) is OneCallEach for one in maps(other))
    pairs = zip(maps(fp32), maps(other), strict=True)
    assert all(x[0] is y[0] for one, its in pairs for x, y in zip(one.parts, its.parts, strict=True))


def test_a_plain_map_whose_rows_change_in_one_call_takes_another_way(monkeypatch):
    """Where F.linear itself sums four rows in another order, every pair still gets the bits of two."""
    real = F.linear

    def altered(x, weight, bias=None):
        return real(x, weight, bias) if x.numel() // x.shape[-1] < 4 else real(x, weight, bias) * (1 + 2**-20)

    _, weight = cancelling(2, 64, 48, torch.float32, CPU)
    linear, x = Plain([(weight, None)]), random_tensor(8, 1, 64, seed=4)
    monkeypatch.setattr(F, "linear", altered)
    way = independence._way(linear, 4)
    assert way in (Pairs, OneCallEach)
    alone = torch.cat([linear(pair.clone())[0] for pair in x.split(2)])
    assert not same_bits(linear(x)[0], alone), "the control"
    assert same_bits(way(linear.parts)(x)[0], alone)


def test_a_head_too_large_to_be_made_twice_is_tried_itself(bf16, monkeypatch, unknown):
    """The trial layer then has a small head, of a shape that no map of the model has."""
    monkeypatch.setattr(independence, "LARGE", bf16.config.vocab_size * bf16.config.hidden_size - 1)
    monkeypatch.setattr(independence, "FEW_TOKENS", 40)
    tried = []
    unknown("row_counts_equal", lambda real: lambda function, x: tried.append(function(x[:2])) or real(function, x))
    assert together_here(bf16).size >= 1
    assert bf16.config.vocab_size in {out.shape[-1] for out in tried}


class Unpacked(PackedWeight):
    """Stands in for oneDNN's packed weight on a CPU that packs no BF16: F.linear itself, and the row counts called."""

    called: ClassVar[set[int]] = set()

    def __init__(self, weight, bias):
        self.packed, self.bias = weight, bias

    def __call__(self, rows):
        self.called.add(rows.numel() // rows.shape[-1])
        return F.linear(rows, self.packed, self.bias)

    def weight(self):
        return self.packed


class Odd(Unpacked):
    """A packed weight whose rows have other bits in calls of six and more."""

    def __call__(self, rows):
        out = super().__call__(rows)
        return out if rows.numel() // rows.shape[-1] < 6 else -out


@pytest.mark.parametrize("kind", [Unpacked, Odd])
def test_packed_weights_are_tried_at_load_for_one_request_and_here_for_several(tiny_directory, kind, monkeypatch):
    """oneDNN keeps memory of every row count called, so loading tries the two of one request."""
    monkeypatch.setattr(packed, "_EQUAL", {})
    monkeypatch.setattr(independence, "_KNOWN", {})
    monkeypatch.setattr(packed, "PackedWeight", kind)
    monkeypatch.setattr(packed, "packing_works", lambda dtype: True)
    Unpacked.called.clear()
    model = load_model(tiny_directory, numeric("bf16", linear="packed"), copies=1)
    assert Unpacked.called == {1, 2}
    assert model.layers[0].qkv_proj.counts == model.lm_head.counts == (1, 2)
    plain = together_here(load_model(tiny_directory, numeric("bf16"), copies=1))
    found = together_here(model)
    joint, head = found.model.layers[0].qkv_proj, found.model.lm_head
    if plain.size == LARGEST:  # F.linear's rows keep their bits here
        assert joint.counts == head.counts == (None if kind is Unpacked else (1, 2)), "else F.linear takes the rows"
    assert joint.run is model.layers[0].qkv_proj.run and model.lm_head.counts == (1, 2)
    x = random_tensor(2 * found.size, 1, model.config.hidden_size, dtype=torch.bfloat16)
    alone = [plain.model.layers[0].qkv_proj(pair.clone()) for pair in x.split(2)]
    assert all(same_bits(mine, torch.cat(own)) for mine, own in zip(joint(x), zip(*alone)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_requests_attend_in_one_call_where_the_kernel_and_the_layer_allow_it(tiny_directory, dtype, monkeypatch):
    monkeypatch.setattr(independence, "_KNOWN", {})
    model = load_model(tiny_directory, numeric(dtype, kernels="invariant"))
    found = together_here(model, 4)
    assert found.size == 4 and found.model.attend_several is blocked_several and model.attend_several is None
    assert together_here(load_model(tiny_directory, numeric(dtype)), 2).model.attend_several is None

    def mixed(query, held, masks, scaling):
        return blocked_several(query, held, masks, scaling).roll(2, dims=0)

    monkeypatch.setitem(SEVERAL_KERNELS, "blocked", mixed)
    monkeypatch.setattr(independence, "_KNOWN", {})
    alone = together_here(model, 4)
    assert alone.size == 4 and alone.model.attend_several is None, "the control: each request attends in its own call"
