"""Traces of two constructions or of the last slots are compared where both have them; their size is foreseen."""

import pytest
import torch
from safetensors.torch import load_file

from cache import Boundary, build_prefill
from cache.boundary import SCHEMA as BOUNDARY
from cache.storage import open_tensors
from experiments.run.saving import SCHEMA as TRACE
from experiments.run.saving import Trace, require_room, slot_bytes
from minimodel.bits import bits
from tests.experiments.crosscheck.recordings import BUILD
from tests.experiments.runs import call, crosscheck
from tests.helpers import refused

FILES = ("boundary", "trace")


def test_live_and_prefill_traces_have_the_same_names_and_can_be_compared(genuine):
    report = crosscheck(genuine["incremental trace"], genuine["prefill trace"])
    (finding,) = report["findings"]["r"]
    assert finding["construction"] == "incremental against prefill"
    assert finding["first"]["tensor"] == "self_attn.attention"


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_trace_of_the_last_slots_is_compared_where_both_have_them(
    genuine, bf16, tmp_path, state, provenance, construction
):
    whole, last = genuine[f"{construction} trace"], Trace(last=5)
    boundary = BUILD[construction](bf16, state, observe=last.observe)
    last.save(tmp_path / "last.safetensors", boundary, provenance, "r")
    kept = open_tensors(tmp_path / "last.safetensors", TRACE)
    assert kept.names == open_tensors(whole, TRACE).names
    assert kept.tensor("embed").shape[1] == 5 and kept.tensor("layers.0.self_attn.k_rotary").shape[2] == 5
    assert call("crosscheck", whole, tmp_path / "last.safetensors").exit_code == 0
    other = load_file(whole)["layers.1.mlp.product"][:, -5:]
    assert torch.equal(bits(kept.tensor("layers.1.mlp.product")), bits(other.contiguous()))


def test_the_size_of_a_trace_is_foreseen(genuine, bf16, state):
    sizes = {name: tensor.nbytes for name, tensor in load_file(genuine["prefill trace"]).items()}
    assert slot_bytes(bf16.config, "bf16") * len(state) == sum(sizes.values()) - sizes["logits"]
    require_room(bf16.config, "bf16", 1000)
    with refused("--trace-last", str(10**9)):
        require_room(bf16.config, "bf16", 10**9)


@pytest.mark.parametrize(
    ("chunk", "construction", "calls"),
    [
        (None, "prefill", "one"),
        (10_000, "prefill", "one"),
        (3, "prefill_in_calls_of_3", "one for 3 tokens"),
        (1, "prefill_in_calls_of_1", "one a token"),
    ],
)
def test_a_prefill_of_several_calls_says_so_in_both_files(
    bf16, tmp_path, state, provenance, chunk, construction, calls
):
    """Also where the trace kept the last slots alone: the last call of several may be a single token."""
    for last in (None, 1):
        trace = Trace(last)
        boundary = build_prefill(bf16, state, chunk=chunk, observe=trace.observe)
        boundary.save(tmp_path / "boundary.safetensors", provenance, "r")
        trace.save(tmp_path / "trace.safetensors", boundary, provenance, "r")
        headers = [open_tensors(tmp_path / f"{name}.safetensors", (TRACE, BOUNDARY)).header for name in FILES]
        assert [header["construction"] for header in headers] == [construction] * 2
        assert headers[1]["calls"] == calls
        loaded = Boundary.load(tmp_path / "boundary.safetensors", state.contract, provenance)
        assert loaded.construction == boundary.construction == boundary.replica().construction
