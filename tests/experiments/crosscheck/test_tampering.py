"""Where one known thing is wrong in one of two files, exactly that thing is named."""

import shutil

import pytest
from safetensors.torch import load_file

from decode import Contract, State
from minimodel import load_model
from minimodel.bits import bits
from minimodel.roles import BRANCH_1, BRANCH_3, VISIBILITY
from tests.conftest import numeric
from tests.experiments.crosscheck.recordings import BUILD, record
from tests.experiments.runs import crosscheck
from tests.helpers import edit_json, edit_tensors

both_constructions = pytest.mark.parametrize("construction", list(BUILD))


class Tampered:
    """A decoder whose calls go through `tamper(model, arguments)`; everything else is the decoder's own."""

    def __init__(self, model, tamper):
        self._model, self._tamper = model, tamper

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *arguments):
        return self._tamper(self._model, *arguments)


@pytest.fixture
def findings(genuine, tiny_directory, bf16, tmp_path, state, provenance):
    """The findings on the trace and on the boundary of one construction, made wrongly: under a checkpoint whose files
    were changed, recorded under the right one's name, or by a decoder that is tampered with."""

    def found(construction, change=None, tamper=None):
        model, own = Tampered(bf16, tamper), state
        if change is not None:
            directory = shutil.copytree(tiny_directory, tmp_path / "checkpoint")
            change(directory)
            model, own = (
                load_model(directory, numeric("bf16")),
                State.from_tokens(Contract.load(directory), state.tokens),
            )
        files = record(tmp_path, model, own, state, construction, provenance)
        names = (f"{construction} trace", f"{construction} boundary")
        return [crosscheck(genuine[name], files[name])["findings"]["r"][0] for name in names]

    return found


def step(finding):
    return finding["first"]["step"], finding["first"]["position"]


@both_constructions
def test_one_flipped_bit_in_one_weight(findings, state, construction):
    name, row = "model.layers.1.mlp.up_proj.weight", 0

    def flip(directory):
        nonlocal row
        weight = load_file(directory / "model.safetensors")[name]
        row = int(weight.abs().argmax()) // weight.shape[1]
        bits(weight)[row, int(weight[row].abs().argmax())] ^= -(1 << 15)  # the sign of the largest weight
        edit_tensors(directory / "model.safetensors", **{name: weight})

    trace, boundary = findings(construction, flip)
    found = trace["first"]
    assert step(trace) == ("layers.1.mlp.up_proj", 0) and (found["layer"], found["component"]) == (1, row)
    assert found["ulp"] > 0 and 0 < found["differing"] <= len(state)
    assert (boundary["first"]["step"], boundary["first"]["layer"]) == ("layers.2.key", 2)


def test_rope_base_ten_thousand(findings):
    trace, _ = findings("prefill", lambda directory: edit_json(directory / "config.json", rope_theta=10000.0))
    # at position 0 every angle is 0, and component 0 turns at one radian a token whatever the base
    assert step(trace) == ("layers.0.self_attn.q_rotary", 1) and trace["first"]["component"] != 0


@both_constructions
def test_a_shifted_position(findings, construction):
    def shift(model, ids, roles, positions, *rest):
        return model(ids, roles, positions + (positions >= 7), *rest)

    trace, boundary = findings(construction, tamper=shift)
    assert step(trace) == ("layers.0.self_attn.q_rotary", 7) and step(boundary) == ("layers.0.key", 7)


def test_a_role_row_off_by_one(findings):
    def change(directory):
        path = directory / "role_embedding.safetensors"
        edit_tensors(path, weight=load_file(path)["weight"].roll(1, 0).contiguous())

    trace, _ = findings("prefill", change)
    assert step(trace) == ("embed", 0) and trace["first"]["layer"] is None


@both_constructions
def test_a_visibility_entry_flipped(findings, state, construction):
    table = [list(row) for row in VISIBILITY]
    table[BRANCH_3][BRANCH_1] = 1
    trace, _ = findings(construction, lambda directory: edit_json(directory / "contract.json", visibility=table))
    assert step(trace) == ("layers.0.self_attn.attention", state.roles.index(BRANCH_3))
    assert any("functional state differs" in note for note in trace["notes"])


def test_a_stale_cache_row(findings):
    layer, slot = 1, 9

    def keep_old(model, ids, roles, positions, mask, cache, *observers):
        hidden = model(ids, roles, positions, mask, cache, *observers)
        if len(cache) == slot + 1:
            cache.keys(layer)[:, :, slot] = cache.keys(layer)[:, :, slot - 1]
        return hidden

    trace, boundary = findings("incremental", tamper=keep_old)
    assert step(boundary) == ("layers.1.key", slot)
    assert step(trace) == ("layers.1.self_attn.attention", slot + 1)  # the first step that reads the row
