"""Where one known thing is wrong in one of two files, exactly that thing is named."""

import json

import pytest
from safetensors.torch import load_file, save_file

from minimodel.bits import bits
from minimodel.roles import BRANCH_1, BRANCH_3, VISIBILITY
from tests.experiments.crosscheck.recordings import BUILD, Tampered, altered, first, from_directory, record
from tests.experiments.crosschecks import checked


@pytest.mark.parametrize("construction", list(BUILD))
def test_one_flipped_bit_in_one_weight(genuine, tiny_directory, tmp_path, state, provenance, construction):
    name = "model.layers.1.mlp.up_proj.weight"
    row = 0

    def flip(directory):
        nonlocal row
        weights = load_file(directory / "model.safetensors")
        row = int(weights[name].abs().argmax()) // weights[name].shape[1]
        column = int(weights[name][row].abs().argmax())
        bits(weights[name])[row, column] ^= -(1 << 15)  # the sign of the largest weight
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    files = from_directory(altered(tiny_directory, tmp_path, flip), tmp_path, state, construction, provenance)
    found = first(genuine[f"{construction} trace"], files[f"{construction} trace"])
    assert (found["step"], found["layer"], found["component"]) == ("layers.1.mlp.up_proj", 1, row)
    assert found["position"] == 0 and found["ulp"] > 0 and 0 < found["differing"] <= len(state)
    found = first(genuine[f"{construction} boundary"], files[f"{construction} boundary"])
    assert (found["step"], found["layer"]) == ("layers.2.key", 2)


def test_rope_base_ten_thousand(genuine, tiny_directory, tmp_path, state, provenance):
    def change(directory):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, "prefill", provenance)
    found = first(genuine["prefill trace"], files["prefill trace"])
    # at position 0 every angle is 0, and component 0 turns at one radian a token whatever the base
    assert (found["step"], found["position"]) == ("layers.0.self_attn.q_rotary", 1) and found["component"] != 0


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_shifted_position(genuine, bf16, tmp_path, state, provenance, construction):
    def shift(model, ids, roles, positions, *rest):
        return model(ids, roles, positions + (positions >= 7), *rest)

    files = record(tmp_path, Tampered(bf16, shift), state, state, construction, provenance)
    found = first(genuine[f"{construction} trace"], files[f"{construction} trace"])
    assert (found["step"], found["position"]) == ("layers.0.self_attn.q_rotary", 7)
    found = first(genuine[f"{construction} boundary"], files[f"{construction} boundary"])
    assert (found["step"], found["position"]) == ("layers.0.key", 7)


def test_a_role_row_off_by_one(genuine, tiny_directory, tmp_path, state, provenance):
    def change(directory):
        table = load_file(directory / "role_embedding.safetensors")["weight"]
        save_file({"weight": table.roll(1, 0).contiguous()}, directory / "role_embedding.safetensors")

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, "prefill", provenance)
    found = first(genuine["prefill trace"], files["prefill trace"])
    assert (found["step"], found["layer"], found["position"]) == ("embed", None, 0)


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_visibility_entry_flipped(genuine, tiny_directory, tmp_path, state, provenance, construction):
    table = [list(row) for row in VISIBILITY]
    table[BRANCH_3][BRANCH_1] = 1

    def change(directory):
        contract = json.loads((directory / "contract.json").read_text())
        (directory / "contract.json").write_text(json.dumps({**contract, "visibility": table}))

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, construction, provenance)
    (finding,) = checked(genuine[f"{construction} trace"], files[f"{construction} trace"])["findings"]["r"]
    found = finding["first"]
    assert (found["step"], found["position"]) == ("layers.0.self_attn.attention", state.roles.index(BRANCH_3))
    assert any("functional state differs" in note for note in finding["notes"])


def test_a_stale_cache_row(genuine, bf16, tmp_path, state, provenance):
    layer, slot = 1, 9

    def keep_old(model, ids, roles, positions, mask, cache, *observers):
        hidden = model(ids, roles, positions, mask, cache, *observers)
        if len(cache) == slot + 1:
            cache.keys(layer)[:, :, slot] = cache.keys(layer)[:, :, slot - 1]
        return hidden

    files = record(tmp_path, Tampered(bf16, keep_old), state, state, "incremental", provenance)
    found = first(genuine["incremental boundary"], files["incremental boundary"])
    assert (found["step"], found["layer"], found["position"]) == ("layers.1.key", layer, slot)
    found = first(genuine["incremental trace"], files["incremental trace"])  # the first step that reads the row
    assert (found["step"], found["position"]) == ("layers.1.self_attn.attention", slot + 1)
