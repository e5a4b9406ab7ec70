"""Cross-checking two files: equal where equal, and where one known thing is wrong, exactly that thing is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import build_incremental, build_live, build_prefill
from cache.kv import KVCache
from cache.storage import Provenance, open_tensors
from decode import Contract, State
from experiments.compare.tensors import first_difference, ulp_distance
from experiments.harness.options import DEMO
from experiments.harness.tasks import load_tasks
from experiments.harness.trace import SCHEMA as TRACE
from experiments.harness.trace import Trace, require_room, slot_bytes
from minimodel import Decoder, load_model
from minimodel.numbers import bits
from minimodel.roles import BRANCH_1, BRANCH_3, VISIBILITY
from tests.conftest import numeric
from tests.experiments.crosschecks import checked, run
from tests.helpers import refused

BUILD = {"incremental": build_incremental, "prefill": build_prefill}


class Tampered:
    """A decoder whose calls go through `tamper(model, arguments)`; everything else is the decoder's own."""

    def __init__(self, model: Decoder, tamper: Callable[..., torch.Tensor]) -> None:
        self._model, self._tamper = model, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return self._tamper(self._model, *arguments)


@pytest.fixture(scope="module")
def state(tiny_directory: Path, bf16: Decoder, prompt: State) -> State:
    bf16.numeric.apply()
    return build_live(bf16, prompt).state


@pytest.fixture(scope="module")
def provenance(tiny_directory: Path) -> Provenance:
    numeric("bf16").apply()
    return Provenance.here(tiny_directory, numeric("bf16"))


@pytest.fixture(scope="module")
def genuine(
    tmp_path_factory: pytest.TempPathFactory, bf16: Decoder, state: State, provenance: Provenance
) -> dict[str, Path]:
    """Untampered files by construction and kind: "incremental trace", "prefill boundary", ..."""
    folder, files = tmp_path_factory.mktemp("genuine"), {}
    bf16.numeric.apply()
    for construction in BUILD:
        files |= record(folder, bf16, state, state, construction, provenance)
    return files


def record(
    folder: Path, model: Any, state: State, claimed: State, construction: str, provenance: Provenance
) -> dict[str, Path]:
    """Writes boundary and trace of `state` under `model`, as a recorder that believes in the state `claimed` would."""
    trace = Trace()
    boundary = BUILD[construction](model, state, observe=trace.observe)
    boundary = replace(boundary, state=claimed)
    files = {f"{construction} {kind}": folder / f"{construction}-{kind}.safetensors" for kind in ("boundary", "trace")}
    boundary.save(files[f"{construction} boundary"], provenance, "r")
    trace.save(files[f"{construction} trace"], boundary, provenance, "r")
    return files


def first(left: Path, right: Path) -> dict[str, Any]:
    (finding,) = checked(left, right)["findings"]["r"]
    return finding["first"]


def altered(tiny_directory: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    directory = folder / "checkpoint"
    shutil.copytree(tiny_directory, directory)
    change(directory)
    return directory


def from_directory(
    directory: Path, folder: Path, state: State, construction: str, provenance: Provenance
) -> dict[str, Path]:
    """Recorded from another directory's weights and contract, under the first one's name."""
    own = State.from_tokens(Contract.load(directory), state.tokens)
    return record(folder, load_model(directory, numeric("bf16")), own, state, construction, provenance)


@pytest.mark.parametrize("construction", list(BUILD))
@pytest.mark.parametrize("kind", ["boundary", "trace"])
def test_two_computations_of_one_thing_are_equal(
    genuine: dict[str, Path],
    tmp_path: Path,
    bf16: Decoder,
    state: State,
    provenance: Provenance,
    construction: str,
    kind: str,
) -> None:
    again = record(tmp_path, bf16, state, state, construction, provenance)
    result = run(genuine[f"{construction} {kind}"], again[f"{construction} {kind}"])
    assert result.exit_code == 0 and result.output.splitlines()[-1].startswith("equal: "), result.output
    assert again[f"{construction} {kind}"].read_bytes() == genuine[f"{construction} {kind}"].read_bytes()


def test_another_attention_kernel(genuine: dict[str, Path], tiny_directory: Path, tmp_path: Path, state: State) -> None:
    other = numeric("bf16", attention="eager")
    model = load_model(tiny_directory, other)
    files = record(tmp_path, model, state, state, "incremental", Provenance.here(tiny_directory, other))
    report = checked(genuine["incremental trace"], files["incremental trace"], "--checkpoint", tiny_directory)
    (finding,) = report["findings"]["r"]
    assert finding["first"]["tensor"] == "self_attn.attention" and finding["first"]["head"] is not None
    assert "repeat_kv" in finding["kernels"]["A"] and "eager" not in finding["kernels"]["A"]
    assert "eager" in finding["kernels"]["B"] and "repeat_kv" not in finding["kernels"]["B"]
    assert any("attention" in line and "repeat_kv" in line and "eager" in line for line in report["environment"])
    # from the boundaries alone, reruns find the very step that the traces show
    report = checked(genuine["incremental boundary"], files["incremental boundary"], "--checkpoint", tiny_directory)
    assert report["findings"]["r"][0]["first"] == finding["first"]
    assert "incremental: B is equal under eager of ours" in report["findings"]["r"][0]["lines"]


def test_packed_heads_on_the_demo_are_named_as_the_cause(tmp_path: Path) -> None:
    """The kernels of two transformers releases, over a prefix long enough for their sums to differ."""
    directory, (task, *_) = DEMO / "primary", load_tasks(DEMO / "tasks.jsonl", 1)[0]
    models = [load_model(directory, numeric("bf16", kernels=name)) for name in ("repeat_kv", "packed_gqa")]
    prompt = State.prompt(Contract.load(directory), task.question, task.choices)
    state, files = build_live(models[0], prompt).state, []
    for model in models:
        files.append(tmp_path / f"{model.numeric.attention}.safetensors")
        build_incremental(model, state).save(files[-1], Provenance.here(directory, model.numeric), "r")
    (finding,) = checked(*files, "--checkpoint", directory)["findings"]["r"]
    assert finding["kernels"] == {"A": ["repeat_kv"], "B": ["packed_gqa"]}


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

    def keep_old(model: Decoder, ids: Any, roles: Any, positions: Any, mask: Any, cache: KVCache, observe: Any) -> Any:
        hidden = model(ids, roles, positions, mask, cache, observe)
        if len(cache) == slot + 1:
            cache.keys(layer)[:, :, slot] = cache.keys(layer)[:, :, slot - 1]
        return hidden

    files = record(tmp_path, Tampered(bf16, keep_old), state, state, "incremental", provenance)
    found = first(genuine["incremental boundary"], files["incremental boundary"])
    assert (found["step"], found["layer"], found["position"]) == ("layers.1.key", layer, slot)
    found = first(genuine["incremental trace"], files["incremental trace"])  # the first step that reads the row
    assert (found["step"], found["position"]) == ("layers.1.self_attn.attention", slot + 1)


def test_live_and_prefill_traces_have_the_same_names_and_can_be_compared(genuine: dict[str, Path]) -> None:
    report = checked(genuine["incremental trace"], genuine["prefill trace"])
    (finding,) = report["findings"]["r"]
    assert finding["construction"] == "incremental against prefill"
    assert finding["first"]["tensor"] == "self_attn.attention"


@pytest.mark.parametrize("construction", list(BUILD))
def test_a_trace_of_the_last_slots_is_compared_where_both_have_them(
    genuine: dict[str, Path], bf16: Decoder, tmp_path: Path, state: State, provenance: Provenance, construction: str
) -> None:
    whole, last = genuine[f"{construction} trace"], Trace(last=5)
    boundary = BUILD[construction](bf16, state, observe=last.observe)
    last.save(tmp_path / "last.safetensors", boundary, provenance, "r")
    kept = open_tensors(tmp_path / "last.safetensors", TRACE)
    assert kept.names == open_tensors(whole, TRACE).names
    assert kept.tensor("embed").shape[1] == 5 and kept.tensor("layers.0.self_attn.k_rotary").shape[2] == 5
    assert run(whole, tmp_path / "last.safetensors").exit_code == 0
    other = load_file(whole)["layers.1.mlp.product"][:, -5:]
    assert torch.equal(bits(kept.tensor("layers.1.mlp.product")), bits(other.contiguous()))


def test_the_size_of_a_trace_is_foreseen(genuine: dict[str, Path], bf16: Decoder, state: State) -> None:
    sizes = {name: tensor.nbytes for name, tensor in load_file(genuine["prefill trace"]).items()}
    assert slot_bytes(bf16.config, "bf16") * len(state) == sum(sizes.values()) - sizes["logits"]
    require_room(bf16.config, "bf16", 1000)
    with refused("--trace-last", str(10**9)):
        require_room(bf16.config, "bf16", 10**9)


@pytest.mark.parametrize("key", ["checkpoint", "contract", "tokens", "dtype"])
def test_what_is_not_comparable_is_refused(
    genuine: dict[str, Path], bf16: Decoder, tmp_path: Path, state: State, provenance: Provenance, key: str
) -> None:
    boundary = build_prefill(bf16, state)
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
    result = run(genuine["prefill boundary"], tmp_path / "b.safetensors")
    assert result.exit_code == 2 and key in result.stderr and result.stderr.count("\n") == 1


def test_bad_arguments_are_one_line(genuine: dict[str, Path], tmp_path: Path) -> None:
    boundary, trace = genuine["prefill boundary"], genuine["prefill trace"]
    for arguments in ([boundary, tmp_path], [boundary, trace], [tmp_path, tmp_path], [boundary, tmp_path / "none"]):
        result = run(*arguments)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output


def test_ulp_distance_and_values() -> None:
    def one(value: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    assert ulp_distance(one(1.0), one(1.0078125)) == 1
    assert ulp_distance(one(0.0), one(-0.0)) == 0
    assert ulp_distance(one(2.0**-133), one(-(2.0**-133))) == 2  # the smallest BF16 values on both sides of zero
    assert ulp_distance(one(1.0, torch.float64), one(2.0, torch.float64)) == 1 << 52
    assert ulp_distance(one(1.0), one(float("nan"))) is None
    left = torch.zeros(1, 4, 6)
    right = left.clone()
    right[0, 2, 5] = -0.0
    found = first_difference("layers.3.self_attn.q_proj", left, right, stop=14, head_dim=3)
    assert found is not None and (found.layer, found.head, found.position, found.component) == (3, 1, 12, 2)
    assert (found.left_bits, found.right_bits, found.ulp, found.differing) == ("0x00000000", "0x80000000", 0, 1)
    rotated = torch.zeros(1, 2, 4, 3)
    other = rotated.clone()
    other[0, 1, 0, 2] = other[0, 0, 3, 0] = 1.0
    found = first_difference("layers.0.self_attn.k_rotary", rotated, other, stop=4, head_dim=3)
    assert found is not None and (found.head, found.position, found.component, found.differing) == (1, 0, 2, 2)
    assert first_difference("norm", left, left.clone(), 4, None) is None
