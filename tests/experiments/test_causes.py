"""The crossing on tiny checkpoints: the flipped bit, the chunk curve, the cells, and the command as a user calls it."""

import pytest

import experiments.causes.__main__ as causes
from cache.drift import compare
from decode.greedy import alone
from experiments.causes.rules import FACTORS
from experiments.report.runs import read_runs
from experiments.report.sections import headlines
from minimodel.invariant import linear as invariant_linear
from minimodel.selfcheck import copies_fault
from tests.conftest import numeric
from tests.experiments.runs import call, inputs, ledger, one_line, open_finished, run

BF16 = ("--dtype", "bf16", "--rows", 2)


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("causes") / "run"
    run(study, "causes", out, *BF16)
    return out


def test_a_flipped_bit_is_caught_at_its_place(three):
    assert causes.flip_is_caught(three.prefill)


def test_chunks_of_one_are_incremental_and_one_call_is_prefill(three):
    curve = alone(causes.chunk_curve(three.model, three.incremental, three.live.state))
    assert curve["1"]["exact"] and curve["1"]["share"] == 0
    one_call, whole = curve["one_call"], compare(three.incremental.cache, three.prefill.cache).as_dict()
    assert not one_call["exact"]
    assert one_call["share"] == whole["differing"] / whole["elements"]
    assert one_call["relative_l2"] == whole["relative_l2"]


def test_the_cells_are_the_four_factor_cells_and_variants_and_one_is_invariant():
    assert causes.CELLS[:4] == FACTORS and len(set(causes.CELLS)) == len(causes.CELLS)
    assert [cell for cell in causes.CELLS if causes.invariant(numeric("bf16", kernels=cell))] == [FACTORS[3]]
    assert [FACTORS[0], FACTORS[3]] == causes.CHUNKED


def test_a_run_holds_every_cell_on_every_prefix_and_the_invariant_one_is_exact(finished):
    manifest, rows, _ = open_finished(finished)
    names = [f"bf16/{cell}" for cell in causes.CELLS]
    assert [row["cell"] for row in rows] == [name for name in names for _ in range(2)]
    assert len({row["prefix"]["sha256"] for row in rows}) == 2 and manifest["panel"]["cells"] == names
    exact = {row["cell"]: row["comparisons"]["incremental:prefill"]["cache"]["exact"] for row in rows}
    assert exact["bf16/blocked/tiled"] and not exact["bf16/repeat_kv/plain"]
    assert {row["cell"] for row in rows if "chunks" in row} == {"bf16/repeat_kv/plain", "bf16/blocked/tiled"}
    differ = sum(not row["comparisons"]["incremental:prefill"]["cache"]["exact"] for row in rows[:2])
    line = f"bf16 rows whose cache differs: {differ} by default, 0 with both kernels invariant"
    assert line in headlines(read_runs([finished])[0])
    report = (finished / "report.md").read_text()
    assert "necessary" in report and "8 of them, bf16 on cpu, attention repeat_kv, blocked, packed_gqa" in report


def test_a_cell_that_this_machine_cannot_run_is_left_out_by_name(study, tmp_path, monkeypatch):
    monkeypatch.setattr(invariant_linear, "place_does_not_matter", lambda *_: False)
    monkeypatch.setattr(invariant_linear, "_PLANS", {})
    copies_fault.cache_clear()
    done = run(study, "causes", tmp_path / "run", *BF16, "--limit", 1)
    none = call("causes", *inputs(study, *BF16, "--cell", "blocked/tiled"), cwd=study)
    one_line(none, "linear kernel tiled: expected invariant rows")
    copies_fault.cache_clear()
    manifest, rows, summary = open_finished(tmp_path / "run")
    tiled = {"bf16/repeat_kv/tiled", "bf16/blocked/tiled"}
    assert set(manifest["panel"]["left_out"]) == set(summary["left_out"]) == tiled
    assert not tiled & {row["cell"] for row in rows} and len(rows) == 6 and summary["verdicts"] == {}
    report = (tmp_path / "run" / "report.md").read_text()
    for cell in tiled:
        assert f"left out: {cell}: linear kernel tiled: expected invariant rows" in done.output and cell in report
    assert report.count("**LEFT OUT:**") == 2


def test_named_cells_alone_are_run_and_decide_nothing(study, finished, tmp_path):
    two = ("--cell", "repeat_kv/plain", "--cell", "blocked/tiled")
    run(study, "causes", tmp_path / "run", *BF16, *two)
    _, rows, summary = open_finished(tmp_path / "run")
    same = [row for row in ledger(finished) if row["cell"] in ("bf16/repeat_kv/plain", "bf16/blocked/tiled")]
    without_index = [{key: value for key, value in row.items() if key not in ("index", "row_sha256")} for row in same]
    assert [{key: row[key] for key in old} for row, old in zip(rows, without_index, strict=True)] == without_index
    assert summary["verdicts"] == {} and "necessary" not in (tmp_path / "run" / "report.md").read_text()
    refused = call("causes", *inputs(study, "--cell", "plain"), cwd=study)
    assert refused.exit_code == 2 and "'plain' is not one of 'repeat_kv/plain'" in refused.stderr
