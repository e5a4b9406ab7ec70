"""Boundaries on disk: every bit comes back, and nothing that is not exactly that boundary is taken for it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cache import Boundary, transplant
from cache.digest import tensor_sha256
from cache.isolation import disjoint
from cache.storage import HEADER, Provenance, open_tensors
from decode import RowFailure, greedy_suffix
from minimodel import InputError
from minimodel.bits import same_bits
from tests.helpers import equal, flip_bit, refused


@pytest.fixture
def provenance(three, tiny_directory):
    three.model.numeric.apply()
    return Provenance.here(tiny_directory, three.model.numeric)


@pytest.fixture
def saved(three, provenance, tmp_path):
    """The path of each construction's file."""
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("live", "incremental", "prefill")}
    for name, path in paths.items():
        getattr(three, name).save(path, provenance, "row 1")
    return paths


@pytest.fixture
def load(contract, provenance):
    return lambda path, **changes: Boundary.load(path, contract, replace(provenance, **changes))


def test_every_bit_and_the_whole_state_come_back(three, saved, load):
    for name, path in saved.items():
        original, loaded = getattr(three, name), load(path)
        assert loaded.construction == name and loaded.state == original.state and loaded.margins == original.margins
        assert loaded.record.sha256() == original.record.sha256() and loaded.record.length == len(original.state)
        assert equal(loaded, original) and disjoint(loaded.tensors(), original.tensors())


def test_a_loaded_boundary_continues_and_transplants_like_the_original(three, saved, load):
    live, prefill, suffix = load(saved["live"]), load(saved["prefill"]), greedy_suffix(three.model, three.live)
    assert greedy_suffix(three.model, live) == greedy_suffix(three.model, live.replica()) == suffix
    swapped, expected = transplant(prefill, live), transplant(three.prefill, three.live)
    assert equal(swapped, expected) and greedy_suffix(three.model, swapped) == greedy_suffix(three.model, expected)


def test_negative_zero_and_every_exponent_survive(three, provenance, load, tmp_path):
    cache = three.live.cache.copy()
    cache.values(1)[:, :, 3] = -0.0
    cache.keys(0)[:, :, 0] = torch.finfo(cache.keys(0).dtype).tiny / 4  # subnormal
    replace(three.live, cache=cache).save(tmp_path / "b.safetensors", provenance)
    loaded = load(tmp_path / "b.safetensors")
    assert loaded.cache.equals(cache) and not loaded.cache.equals(three.live.cache)


def test_saving_twice_writes_the_same_bytes(three, saved, provenance, tmp_path):
    three.live.save(tmp_path / "again.safetensors", provenance, "row 1")
    assert (tmp_path / "again.safetensors").read_bytes() == saved["live"].read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_one_changed_byte_is_found(saved, load):
    data = bytearray(saved["live"].read_bytes())
    data[-7] ^= 1
    saved["live"].write_bytes(data)
    with refused("live.safetensors", "expected the bytes that were written"):
        load(saved["live"])
    saved["prefill"].write_bytes(saved["prefill"].read_bytes()[:-4])
    with refused("prefill.safetensors", "incomplete or damaged"):
        load(saved["prefill"])


def test_another_checkpoint_contract_or_numeric_contract_is_refused(saved, provenance, contract, load):
    path = saved["live"]
    with refused("checkpoint model.safetensors"):
        load(path, checkpoint={**provenance.checkpoint, "model.safetensors": "0" * 64})
    with refused("checkpoint config.json"):
        load(path, checkpoint={name: digest for name, digest in provenance.checkpoint.items() if name != "config.json"})
    with refused("contract caps"):
        Boundary.load(path, replace(contract, caps=(None, 9, 9, 9, 12, 6)), provenance)
    with refused("numeric contract attention", "'eager'", "'repeat_kv'"):
        load(path, numeric={**provenance.numeric, "attention": "eager"})


def put(header, tensors, **changes):
    """Other tensors under their own digests."""
    for name, change in changes.items():
        tensors[name] = change(tensors[name]).contiguous()
        header["tensors"][name] = tensor_sha256(tensors[name])


def cut_slot(header, tensors):
    put(header, tensors, **{name: lambda t: t[:, :, :-1] for name in tensors if name != "logits"})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (cut_slot, ("shape of layers.0.key",)),
        (lambda *file: put(*file, logits=lambda t: t[:1]), ("shape of logits",)),
        (lambda *file: put(*file, logits=lambda t: t[None]), ("shape of logits",)),
        (lambda *file: put(*file, logits=lambda t: t.to(torch.int32)), ("dtype of logits",)),
        (lambda header, _: header.update(schema="other"), ("schema", "'other'")),
        (lambda header, _: header.pop("tokens"), ("header tokens",)),
        (lambda header, _: header.update(tokens=[1, "2"]), ("tokens", "integers")),
        (lambda header, _: header.update(tokens=header["tokens"][:-1]), ("merge's opening delimiter",)),
        (lambda header, _: header.update(functional_sha256="0" * 64), ("functional_sha256",)),
        (lambda header, tensors: (header["tensors"].pop("logits"), tensors.pop("logits")), ("tensors",)),
        (lambda header, tensors: header["tensors"].pop("logits"), ("'logits'", "one side only")),
        (lambda _, tensors: flip_bit(tensors["layers.2.value"], (0, 0, 0, 0)), ("layers.2.value",)),
    ],
)
def test_headers_that_do_not_fit_are_refused(saved, load, change, parts):
    with safe_open(saved["live"], framework="pt") as opened:
        header = json.loads(opened.metadata()[HEADER])
    tensors = load_file(saved["live"])
    change(header, tensors)
    save_file(tensors, saved["live"], metadata={HEADER: json.dumps(header)})
    with refused(*parts):
        load(saved["live"])


def test_files_that_are_no_boundary_and_copies_that_differ_are_not_loaded(
    three, provenance, load, tmp_path, tiny_directory
):
    with refused("model.safetensors", "no header of this project"):
        load(tiny_directory / "model.safetensors")
    with refused("found nothing"):
        load(tmp_path / "none")
    for edit, message in (
        (lambda cache, logits: flip_bit(cache.keys(1), (1, 0, 2, 3)), "cache layer 1 key: the physical copies differ"),
        (lambda cache, logits: flip_bit(logits, (1, 7)), "boundary logits: the physical copies differ"),
        (lambda cache, logits: cache.values(2)[:, 0, 2].fill_(float("nan")), "cache layer 2 value: expected finite"),
    ):
        cache, logits = three.live.cache.copy(), three.live.logits.clone()
        edit(cache, logits)
        replace(three.live, cache=cache, logits=logits).save(tmp_path / "b.safetensors", provenance)
        with pytest.raises(RowFailure, match=message):
            load(tmp_path / "b.safetensors")


def test_a_provenance_is_read_under_its_own_settings(tiny_directory, three, fresh_threads):
    torch.set_num_threads(three.model.numeric.threads + 1)
    with pytest.raises(InputError, match="threads"):
        Provenance.here(tiny_directory, three.model.numeric)


def test_the_header_says_what_the_file_is(saved, three):
    stored = open_tensors(saved["prefill"], "stage-replay-boundary-v1")
    assert stored.header["source"] == "stage-replay" and stored.header["row"] == "row 1"
    assert stored.header["environment"]["torch"] and stored.header["numeric"]["attention"] == "repeat_kv"
    assert stored.names[:2] == ["layers.0.key", "layers.0.value"] and stored.names[-1] == "logits"
    assert same_bits(stored.tensor("logits"), three.prefill.logits)
