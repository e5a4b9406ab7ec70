"""`experiments.machine`: the table says what the checks at load find, for an altered kernel too."""

from pathlib import Path

import pytest

import experiments.machine as machine
from experiments.report.plain import render_text
from experiments.report.sections import MACHINE_HEADER, machine_blocks, machine_file
from minimodel import packed
from minimodel.attention import ATTENTION_KERNELS
from minimodel.config_file import read_config
from minimodel.machine import machine_record
from minimodel.selfcheck import copies_fault
from tests.conftest import numeric
from tests.experiments.runs import call, one_line
from tests.helpers import read_json, refused
from tests.minimodel.test_selfcheck import altered
from tests.tiny import CONFIG

DTYPES = ("bf16", "fp32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """A directory with the machine.json of the tiny checkpoint, one bit of eager's second copy flipped."""
    root = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "BUFFER", 1 << 20)
        patch.setattr(machine, "MOST", 3)
        patch.setattr(machine, "DTYPES", DTYPES)
        patch.setattr(packed, "packing_works", lambda dtype: False)
        patch.setattr(packed, "_EQUAL", {})
        patch.setitem(ATTENTION_KERNELS, "eager", altered("eager", lambda query, keys: keys.shape[2] == 8))
        copies_fault.cache_clear()
        done = call("machine", "--checkpoint", tiny_directory, "--threads", 1, "--out", root / "machine.json", cwd=root)
        copies_fault.cache_clear()
    assert done.exit_code == 0, done.output
    (root / "printed").write_text(done.output)
    return root


def document(root: Path) -> dict:
    return read_json(root / "machine.json")


def test_every_dtype_and_kernel_has_a_row(place: Path) -> None:
    found = document(place)
    assert [(row["dtype"], f"{row['attention']}/{row['linear']}") for row in found["rows"]] == [
        (dtype, kernels)
        for dtype in DTYPES
        for kernels in ("repeat_kv/plain", "packed_gqa/plain", "eager/plain", "repeat_kv/packed", "blocked/tiled")
    ]
    assert found["environment"] == machine_record() and found["read_gigabytes_per_second"] > 0
    assert set(found["checkpoint"]) >= {"config.json", "model.safetensors"}


def test_the_checks_are_those_at_load(place: Path) -> None:
    rows = {(row["dtype"], row["attention"], row["linear"]): row for row in document(place)["rows"]}
    for dtype in DTYPES:
        assert rows[dtype, "repeat_kv", "plain"]["copies_equal"]
        assert not rows[dtype, "eager", "plain"]["copies_equal"], "one flipped bit"
        assert "attention kernel eager" in rows[dtype, "eager", "plain"]["reasons"][0]
        assert "cannot pack" in rows[dtype, "repeat_kv", "packed"]["refused"]
        invariant = rows[dtype, "blocked", "tiled"]
        assert invariant["invariant"] and invariant["copies_equal"] and invariant["rows_together"] == 6
        assert invariant["rows_tried"] == 6 and invariant["step_seconds"] > 0
    assert not rows["fp32", "repeat_kv", "plain"]["invariant"]


def test_the_table_is_printed_and_shown_in_the_report(place: Path) -> None:
    found, printed = document(place), (place / "printed").read_text()
    assert printed == f"{render_text(machine_blocks(found))}machine: {place / 'machine.json'}\n"
    assert "not available" in printed and "NO" in printed and "self_attn.attention" in printed
    shown, *reasons = machine_file(place / "machine.json")
    assert list(shown.header) == MACHINE_HEADER and len(shown.rows) == 10 and len(reasons) == 4


def test_row_counts_are_named_or_counted(place):
    done = {"copies_equal": True, "rows_together": 64, "rows_tried": 64, "invariant": False, "step_seconds": 0.001}
    names = {"dtype": "bf16", "attention": "repeat_kv", "linear": "packed", "packed_tried_at": [1, 2, 4]}
    for counts, text in (([1, 2, 4], "all 3 tried, to 4"), ([2, 4], "2, 4"), ([], "none")):
        rows = [{**done, **names, "packed_equals_plain_at": counts}]
        assert machine_blocks({**document(place), "rows": rows})[0].rows[0][5] == text


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_row_counts_of_packed_weights_are_those_that_were_tried(dtype: str) -> None:
    contract, config = numeric(dtype, linear="packed"), read_config(CONFIG)
    found = machine.packed_counts(config, contract)
    packs = dtype != "fp32" and not packed.why_not_packed(contract.torch_dtype, contract.torch_device)
    assert set(found) <= set(machine.ROW_COUNTS) and sorted(found) == found and (packs or not found)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"schema": "other"}')
    with refused("schema", "stage-replay-machine-v1"):
        machine_file(tmp_path / "machine.json")
    one_line(call("machine", "--checkpoint", "nowhere", "--out", tmp_path / "none.json", cwd=tmp_path), "nowhere")
    assert not (tmp_path / "none.json").exists()
