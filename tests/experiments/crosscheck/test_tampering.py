"""Where one known thing is wrong in one of two files, exactly that thing is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.kv import KVCache
from cache.storage import Provenance
from decode import State
from minimodel import Decoder
from minimodel.bits import bits
from minimodel.roles import BRANCH_1, BRANCH_3, VISIBILITY
from tests.experiments.crosscheck.recordings import BUILD, Tampered, altered, first, from_directory, record
from tests.experiments.crosschecks import checked


@pytest.mark.parametrize("construction", list(BUILD))
def test_one_flipped_bit_in_one_weight(
    genuine: dict[str, Path],
    tiny_directory: Path,
    tmp_path: Path,
    state: State,
    provenance: Provenance,
    construction: str,
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    row = 0

    def flip(directory: Path) -> None:
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


def test_rope_base_ten_thousand(
    genuine: dict[str, Path], tiny_directory: Path, tmp_path: Path, state: State, provenance: Provenance
) -> None:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, "prefill", provenance)
    found = first(genuine["prefill trace"], files["prefill trace"])
    # at position 0 every angle is 0, and component 0 turns at one radian a token whatever the base
    assert (found["step"], found["position"]) == ("layers.0.self_attn.q_rotary", 1) and found["component"] != 0


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_shifted_position(
    genuine: dict[str, Path], bf16: Decoder, tmp_path: Path, state: State, provenance: Provenance, construction: str
) -> None:
    def shift(model: Decoder, ids: Any, roles: Any, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return model(ids, roles, positions + (positions >= 7), *rest)

    files = record(tmp_path, Tampered(bf16, shift), state, state, construction, provenance)
    found = first(genuine[f"{construction} trace"], files[f"{construction} trace"])
    assert (found["step"], found["position"]) == ("layers.0.self_attn.q_rotary", 7)
    found = first(genuine[f"{construction} boundary"], files[f"{construction} boundary"])
    assert (found["step"], found["position"]) == ("layers.0.key", 7)


def test_a_role_row_off_by_one(
    genuine: dict[str, Path], tiny_directory: Path, tmp_path: Path, state: State, provenance: Provenance
) -> None:
    def change(directory: Path) -> None:
        table = load_file(directory / "role_embedding.safetensors")["weight"]
        save_file({"weight": table.roll(1, 0).contiguous()}, directory / "role_embedding.safetensors")

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, "prefill", provenance)
    found = first(genuine["prefill trace"], files["prefill trace"])
    assert (found["step"], found["layer"], found["position"]) == ("embed", None, 0)


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_visibility_entry_flipped(
    genuine: dict[str, Path],
    tiny_directory: Path,
    tmp_path: Path,
    state: State,
    provenance: Provenance,
    construction: str,
) -> None:
    table = [list(row) for row in VISIBILITY]
    table[BRANCH_3][BRANCH_1] = 1

    def change(directory: Path) -> None:
        contract = json.loads((directory / "contract.json").read_text())
        (directory / "contract.json").write_text(json.dumps({**contract, "visibility": table}))

    files = from_directory(altered(tiny_directory, tmp_path, change), tmp_path, state, construction, provenance)
    (finding,) = checked(genuine[f"{construction} trace"], files[f"{construction} trace"])["findings"]["r"]
    found = finding["first"]
    assert (found["step"], found["position"]) == ("layers.0.self_attn.attention", state.roles.index(BRANCH_3))
    assert any("functional state differs" in note for note in finding["notes"])


def test_a_stale_cache_row(
    genuine: dict[str, Path], bf16: Decoder, tmp_path: Path, state: State, provenance: Provenance
) -> None:
    layer, slot = 1, 9

    def keep_old(
        model: Decoder, ids: Any, roles: Any, positions: Any, mask: Any, cache: KVCache, *observers: Any
    ) -> Any:
        hidden = model(ids, roles, positions, mask, cache, *observers)
        if len(cache) == slot + 1:
            cache.keys(layer)[:, :, slot] = cache.keys(layer)[:, :, slot - 1]
        return hidden

    files = record(tmp_path, Tampered(bf16, keep_old), state, state, "incremental", provenance)
    found = first(genuine["incremental boundary"], files["incremental boundary"])
    assert (found["step"], found["layer"], found["position"]) == ("layers.1.key", layer, slot)
    found = first(genuine["incremental trace"], files["incremental trace"])  # the first step that reads the row
    assert (found["step"], found["position"]) == ("layers.1.self_attn.attention", slot + 1)
