"""Layers over several devices: the same bits, and every tensor where its layer is.

Places are distinguished on a machine with one device: torch's fake tensors carry a device (cpu:0, cpu:1) and no data,
and an operation that mixes two of them fails, as it would on real ones. What they cannot show is a CUDA kernel's bits.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import minimodel.attention as attention
import minimodel.decoder as decoder
from cache import KVCache, build_live, build_prefill
from cache.boundary import Boundary
from cache.digest import cache_sha256, tensor_sha256
from cache.storage import Provenance
from decode import greedy_suffix
from minimodel import Decoder, NumericContract, load_model
from minimodel.checkpoint import open_checkpoint
from minimodel.load import device_of, placement
from tests.conftest import numeric
from tests.helpers import refused
from tests.tiny import CONFIG

LAYERS = CONFIG["num_hidden_layers"]


def test_consecutive_layers_share_a_device_and_none_has_two_more_than_another():
    for layers in (1, 2, 3, 24, 48, 80):
        for count in range(1, min(layers, 9) + 1):
            names = [f"cuda:{i}" for i in range(count)]
            places = placement(",".join(names), layers)
            shares = [places.count(torch.device(name)) for name in names]
            assert places == sorted(places, key=lambda place: place.index) and sum(shares) == layers
            assert max(shares) - min(shares) <= 1
    with refused("devices: expected at most one for each of 2 layers, found 'cpu,cpu,cpu'"):
        placement("cpu,cpu,cpu", 2)
    assert numeric("bf16", device="cpu,cpu").torch_device == torch.device("cpu")


def test_the_embedding_lies_with_the_first_layer_and_the_head_with_the_last():
    places = placement("cuda:0,cuda:1,cuda:2", 3)
    wanted = {
        "model.embed_tokens.weight": 0,
        "role_embedding.weight": 0,
        "model.layers.0.mlp.up_proj.weight": 0,
        "model.layers.1.self_attn.q_proj.bias": 1,
        "model.layers.2.input_layernorm.weight": 2,
        "model.norm.weight": 2,
        "lm_head.weight": 2,
    }
    assert {name: device_of(name, places).index for name in wanted} == wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_places_on_one_device_give_the_bits_of_one(tiny_directory, contract, prompt, dtype):
    found = []
    for device in ("cpu", "cpu,cpu", "cpu,cpu,cpu"):
        model = load_model(tiny_directory, numeric(dtype, device=device))
        live = build_live(model, prompt)
        prefill = build_prefill(model, live.state)
        digests = [(cache_sha256(one.cache), tensor_sha256(one.logits)) for one in (live, prefill)]
        found.append((digests, greedy_suffix(model, prefill)))
        assert model.numeric.record()["device"] == device
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] != found[0][0][1], "the control: another construction has other bits"


def test_a_boundary_file_names_its_devices_and_comes_back_to_them(tiny_directory, prompt, tmp_path):
    two = numeric("bf16", device="cpu,cpu")
    model = load_model(tiny_directory, two)
    live = build_live(model, prompt)
    here = Provenance.here(tiny_directory, two)
    live.save(tmp_path / "live.safetensors", here)
    loaded = Boundary.load(tmp_path / "live.safetensors", prompt.contract, here)
    assert loaded.cache.equals(live.cache)
    one = Provenance.here(tiny_directory, numeric("bf16"))
    with refused("numeric contract device: expected 'cpu', found 'cpu,cpu'"):
        Boundary.load(tmp_path / "live.safetensors", prompt.contract, one)


@pytest.fixture
def fake(monkeypatch):
    """Tensors with devices and no data: what looks at values, dead rows and the range of ids, is left out."""
    monkeypatch.setattr(attention, "zero_dead_rows", lambda out, mask: out)
    monkeypatch.setattr(decoder, "check_ids", lambda *given: -1)
    with FakeTensorMode() as mode:
        yield mode


def placed(directory, places, tied):
    """A decoder of fake weights, each where `device_of` says."""
    checkpoint = open_checkpoint(directory)
    weights = {
        name: torch.empty(entry.shape, dtype=torch.bfloat16, device=device_of(name, places))
        for name, entry in checkpoint.tensors.items()
        if not (tied and name == "lm_head.weight")
    }
    return Decoder(checkpoint.config, weights, NumericContract("bf16"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1", "cpu:1,cpu:0,cpu:2"])
def test_every_step_runs_where_its_layer_is(tiny_directory, fake, devices, tied):
    places = placement(devices, LAYERS)
    model = placed(tiny_directory, places, tied)
    cache = KVCache.for_model(model, 2, 9)
    for start, length in ((0, 5), (5, 1), (6, 1)):
        seen = run(model, cache, start, length)
        for name, device in seen.items():
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            first = name in ("embed", "logits")  # choices are made where tokens are embedded
            assert device == (places[layer] if layer is not None else places[0] if first else places[-1]), name
        assert len(seen) == 3 + 15 * LAYERS
    assert len(cache) == 7
    assert [tensor.device for _, _, tensor in cache.tensors()] == [place for place in places for _ in range(2)]


def run(model, cache, start, length):
    """One call of `length` tokens, with a mask; the device of each step's result."""
    device, seen = model.embed_tokens.device, {}
    ids = torch.zeros(2, length, dtype=torch.int64, device=device)
    mask = torch.ones(2, 1, length, start + length, dtype=torch.bool, device=device)

    def note(name, tensor):
        seen[name] = tensor.device

    hidden = model(ids, ids, ids + start, mask, cache, note)
    model.logits(hidden[:, -1:], note)
    return seen


def test_a_layer_whose_border_is_forgotten_fails(tiny_directory, fake):
    """The control: the fake devices do not mix."""
    model = placed(tiny_directory, placement("cpu:0,cpu:1", LAYERS), False)
    model.devices = model.devices[:1] * LAYERS
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        run(model, KVCache.for_model(model, 2, 9), 0, 5)
