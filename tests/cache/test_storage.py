"""Boundaries on disk: every bit comes back, and nothing that is not exactly that boundary is taken for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cache import Boundary, transplant
from cache.isolation import disjoint
from cache.storage import HEADER, Provenance, open_tensors
from decode import greedy_suffix
from minimodel import InputError
from minimodel.bits import same_bits
from tests.helpers import flip_bit, refused


@pytest.fixture
def provenance(three, tiny_directory):
    three.model.numeric.apply()
    return Provenance.here(tiny_directory, three.model.numeric)


@pytest.fixture
def saved(three, provenance, tmp_path):
    paths = {}
    for name in ("live", "incremental", "prefill"):
        paths[name] = tmp_path / f"{name}.safetensors"
        getattr(three, name).save(paths[name], provenance, "row 1")
    return paths


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """The file again, its header and tensors changed."""
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()[HEADER])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, metadata={HEADER: json.dumps(header)})
    return path


def test_every_bit_and_the_whole_state_come_back(three, saved, provenance, contract):
    for name, path in saved.items():
        original, loaded = getattr(three, name), Boundary.load(path, contract, provenance)
        assert loaded.construction == name and loaded.state == original.state and loaded.margins == original.margins
        assert loaded.record.sha256() == original.record.sha256() and loaded.record.length == len(original.state)
        assert loaded.cache.equals(original.cache) and same_bits(loaded.logits, original.logits)
        assert disjoint(loaded.tensors(), original.tensors())


def test_a_loaded_boundary_continues_and_transplants_like_the_original(three, saved, provenance, contract):
    live, prefill = (Boundary.load(saved[name], contract, provenance) for name in ("live", "prefill"))
    assert greedy_suffix(three.model, live) == greedy_suffix(three.model, three.live)
    assert greedy_suffix(three.model, live.replica()) == greedy_suffix(three.model, three.live)
    swapped, expected = transplant(prefill, live), transplant(three.prefill, three.live)
    assert swapped.cache.equals(expected.cache) and same_bits(swapped.logits, expected.logits)
    assert greedy_suffix(three.model, swapped) == greedy_suffix(three.model, expected)


def test_negative_zero_and_every_exponent_survive(three, provenance, contract, tmp_path):
    cache = three.live.cache.copy()
    cache.values(1)[:, :, 3] = -0.0
    cache.keys(0)[:, :, 0] = torch.finfo(cache.keys(0).dtype).tiny / 4  # subnormal
    replace(three.live, cache=cache).save(tmp_path / "b.safetensors", provenance)
    loaded = Boundary.load(tmp_path / "b.safetensors", contract, provenance)
    assert loaded.cache.equals(cache) and not loaded.cache.equals(three.live.cache)


def test_saving_twice_writes_the_same_bytes(three, saved, provenance, tmp_path):
    three.live.save(tmp_path / "again.safetensors", provenance, "row 1")
    assert (tmp_path / "again.safetensors").read_bytes() == saved["live"].read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_one_changed_byte_is_found(saved, provenance, contract):
    data = bytearray(saved["live"].read_bytes())
    data[-7] ^= 1
    saved["live"].write_bytes(data)
    with refused("live.safetensors", "expected the bytes that were written"):
        Boundary.load(saved["live"], contract, provenance)
    saved["prefill"].write_bytes(saved["prefill"].read_bytes()[:-4])
    with refused("prefill.safetensors", "incomplete or damaged"):
        Boundary.load(saved["prefill"], contract, provenance)


def test_another_checkpoint_contract_or_numeric_contract_is_refused(saved, provenance, contract):
    other = replace(provenance, checkpoint={**provenance.checkpoint, "model.safetensors": "0" * 64})
    with refused("checkpoint model.safetensors"):
        Boundary.load(saved["live"], contract, other)
    with refused("contract caps"):
        Boundary.load(saved["live"], replace(contract, caps=(None, 9, 9, 9, 12, 6)), provenance)
    kernel = replace(provenance, numeric={**provenance.numeric, "attention": "eager"})
    with refused("numeric contract attention", "'eager'", "'repeat_kv'"):
        Boundary.load(saved["live"], contract, kernel)
    assert Boundary.load(saved["live"], contract, kernel, same_numeric=False).construction == "live"
    wide = replace(provenance, numeric={**provenance.numeric, "dtype": "fp64"})
    with refused("dtype", "'fp64'"):
        Boundary.load(saved["live"], contract, wide, same_numeric=False)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
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
def test_headers_that_do_not_fit_are_refused(saved, provenance, contract, change, parts):
    with refused(*parts):
        Boundary.load(rewrite(saved["live"], change), contract, provenance)


def test_files_that_are_no_boundary(tmp_path, tiny_directory, provenance, contract):
    with refused("model.safetensors", "no header of this project"):
        Boundary.load(tiny_directory / "model.safetensors", contract, provenance)
    with refused("found nothing"):
        Boundary.load(tmp_path / "none", contract, provenance)


def test_copies_that_differ_are_not_loaded(three, provenance, contract, tmp_path):
    cache = three.live.cache.copy()
    flip_bit(cache.keys(1), (1, 0, 2, 3))
    replace(three.live, cache=cache).save(tmp_path / "b.safetensors", provenance)
    with pytest.raises(RuntimeError, match="layer 1 key"):
        Boundary.load(tmp_path / "b.safetensors", contract, provenance)


def test_a_provenance_is_read_under_its_own_settings(tiny_directory, three, fresh_threads):
    torch.set_num_threads(three.model.numeric.threads + 1)
    with pytest.raises(InputError, match="threads"):
        Provenance.here(tiny_directory, three.model.numeric)


def test_the_header_says_what_the_file_is(saved):
    stored = open_tensors(saved["prefill"], "stage-replay-boundary-v1")
    assert stored.header["source"] == "stage-replay" and stored.header["row"] == "row 1"
    assert stored.header["environment"]["torch"] and stored.header["numeric"]["attention"] == "repeat_kv"
    assert stored.names[:2] == ["layers.0.key", "layers.0.value"] and stored.names[-1] == "logits"
