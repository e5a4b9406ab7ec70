"""Cross-checking two files: equal where equal, and refused where they are not of one thing."""

from dataclasses import replace

import pytest
import torch

from cache import build_prefill
from cache.storage import open_tensors, write_tensors
from experiments.run.saving import SCHEMA as TRACE
from tests.experiments.crosscheck.recordings import BUILD, record
from tests.experiments.runs import call, crosscheck, one_line


@pytest.mark.parametrize("construction", list(BUILD))
@pytest.mark.parametrize("kind", ["boundary", "trace"])
def test_two_computations_of_one_thing_are_equal(genuine, tmp_path, bf16, state, provenance, construction, kind):
    again = record(tmp_path, bf16, state, state, construction, provenance)
    result = call("crosscheck", genuine[f"{construction} {kind}"], again[f"{construction} {kind}"])
    assert result.exit_code == 0 and result.output.splitlines()[-1].startswith("equal: "), result.output
    assert again[f"{construction} {kind}"].read_bytes() == genuine[f"{construction} {kind}"].read_bytes()


@pytest.mark.parametrize("key", ["checkpoint", "contract", "tokens", "dtype", "shape"])
def test_what_is_not_comparable_is_refused(genuine, bf16, tmp_path, state, provenance, key):
    boundary = build_prefill(bf16, state, copies=1 if key == "shape" else 2)
    if key == "checkpoint":
        provenance = replace(provenance, checkpoint={**provenance.checkpoint, "config.json": "0" * 64})
    if key == "dtype":
        provenance = replace(provenance, numeric={**provenance.numeric, "dtype": "fp32"})
    if key == "tokens":
        boundary = replace(boundary, state=replace(state, tokens=(*state.tokens[:-1], 5)))
    if key == "contract":
        other = replace(state.contract, caps=(None, 9, 9, 9, 12, 6))
        boundary = replace(boundary, state=replace(state, contract=other))
    boundary.save(tmp_path / "b.safetensors", provenance)
    one_line(call("crosscheck", genuine["prefill boundary"], tmp_path / "b.safetensors"), key)


def test_a_tensor_or_a_record_of_one_side_alone_is_a_difference(genuine, bf16, tmp_path, state, provenance):
    """Where all that both have is equal."""
    boundary, path = build_prefill(bf16, state), tmp_path / "b.safetensors"
    record = boundary.record.copy()
    record.enter(*(torch.ones(2, 1, dtype=torch.int64) for _ in range(3)), None)
    replace(boundary, record=record).save(path, provenance, "r")
    report = crosscheck(genuine["prefill boundary"], path)
    assert report["verdict"].endswith("0 differ") and "functional state differs" in str(report["findings"])
    stored = open_tensors(genuine["prefill trace"], TRACE)
    header = {key: value for key, value in stored.header.items() if key not in ("schema", "tensors")}
    kept = {name: stored.tensor(name) for name in stored.names if name != "layers.1.mlp.product"}
    write_tensors(path, TRACE, header, provenance, kept)
    for pair, letter in (((genuine["prefill trace"], path), "A"), ((path, genuine["prefill trace"]), "B")):
        report = crosscheck(*pair)
        assert report["verdict"].endswith("0 differ")
        assert f"step layers.1.mlp.product only in {letter}" in str(report["findings"])


def test_bad_arguments_are_one_line(genuine, tmp_path):
    boundary, trace = genuine["prefill boundary"], genuine["prefill trace"]
    for arguments in ([boundary, tmp_path], [boundary, trace], [tmp_path, tmp_path], [boundary, tmp_path / "none"]):
        one_line(call("crosscheck", *arguments))
