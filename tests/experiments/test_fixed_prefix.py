"""fixed_prefix on a tiny checkpoint: the bank, both precisions in one run, the crossing, gates, resumption."""

import shutil
from types import SimpleNamespace

import pytest

import experiments.fixed_prefix as fixed_prefix
import experiments.run.experiment as experiment
from decode.state import token_digest
from experiments.fixed_prefix import FixedPrefix
from experiments.run.inputs import open_bank, open_strata
from experiments.run.ledger import sha256_file
from experiments.run.summary import cross_precision
from tests.experiments.runs import (
    ROWS,
    altered,
    call,
    inputs,
    interrupt,
    ledger,
    manifest_of,
    one_line,
    open_finished,
    rewrite,
    run,
    summary_of,
)
from tests.helpers import edit_json, refused


@pytest.fixture(scope="module")
def finished(study):
    return study / "runs/fixed_prefix-bf16-fp32"


def test_the_bank_is_every_prefix_of_the_matrix_in_source_order(study, finished):
    matrix = ledger(study / "runs/matrix-bf16")
    manifest, rows, _ = open_finished(finished)
    frozen = manifest["panel"]["bank"]
    assert frozen["rows"] == ROWS and frozen["ledger_sha256"] == sha256_file(study / "runs/matrix-bf16/rows.jsonl")
    # this run's prefixes and those of the run it was made from are one bank
    banks = open_bank(finished), open_bank(study / "runs/matrix-bf16")
    assert banks[0].record() == banks[1].record() == frozen
    for bank in banks:
        assert [list(prefix.tokens) for prefix in bank.prefixes] == [row["prefix"]["tokens"] for row in matrix]
    for row in rows:
        assert row["prefix"]["tokens"] == matrix[row["index"] % ROWS]["prefix"]["tokens"]


def test_all_rows_of_one_precision_come_before_those_of_the_other(finished):
    manifest, rows, _ = open_finished(finished)
    names = [f"t{i:03d}" for i in range(ROWS)]
    assert [(row["dtype"], row["row"]) for row in rows] == [(d, n) for d in ("bf16", "fp32") for n in names]
    assert [one["dtype"] for one in manifest["numeric"]] == ["bf16", "fp32"]
    for row in rows:
        assert row["arms"]["prefill"]["geometry"]["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[row["dtype"]]
        assert row["comparisons"]["incremental:incremental_replica"]["cache"]["exact"]
        assert row["comparisons"]["prefill:prefill_replica"]["cache"]["exact"]
        assert not row["comparisons"]["incremental:prefill"]["cache"]["exact"]


def test_the_summary_counts_each_precision_and_the_crossing(finished):
    _, rows, summary = open_finished(finished)
    differ = dict.fromkeys(("bf16", "fp32"), 0)
    for row in rows:
        differ[row["dtype"]] += not row["comparisons"]["incremental:prefill"]["suffix"]["exact"]
    for dtype, count in differ.items():
        block = summary["precisions"][dtype]
        assert block["rows"] == ROWS and block["suffix_disagreement"]["count"] == count
    crossed = summary["cross_precision"]
    assert crossed["rows"] == ROWS and crossed["prefix_identity"]["count"] == ROWS
    change = crossed["suffix_disagreement"]
    assert (change["bf16_count"], change["fp32_count"]) == (differ["bf16"], differ["fp32"])
    assert change["difference_points"] == pytest.approx(100 * (differ["fp32"] - differ["bf16"]) / ROWS)
    assert crossed["logits_disagreement"]["n"] == ROWS and 0 <= change["mcnemar_p"] <= 1
    report = (finished / "report.md").read_text()
    assert "| endpoint | fixed_prefix, bf16 | fixed_prefix, fp32 |" in report and "suffix disagreement" in report


def synthetic(dtype, differs, prefix=0):
    """Ledger rows with no more than the crossing reads; incremental is always right, prefill where they agree."""
    rows = []
    for i, differ in enumerate(differs):
        digest, pair = str(i + prefix), {"suffix": {"exact": not differ}, "logits": {"exact": False}}
        pair |= dict.fromkeys(("answer_equal", "answer_tokens_equal", "correct_equal"), not differ)
        labels = {"incremental": True, "prefill": not differ}
        arms = {arm: {"correct": right, "boundary_state_sha256": digest} for arm, right in labels.items()}
        row = {"row": f"r{i}", "dtype": dtype, "prefix": {"sha256": digest}, "arms": arms}
        rows.append({**row, "comparisons": {"incremental:prefill": pair}})
    return rows


def test_the_crossing_on_counts_worked_out_by_hand():
    rows = [*synthetic("bf16", [True] * 6 + [False] * 4), *synthetic("fp32", [False] * 9 + [True])]
    crossed = cross_precision(rows, "bf16", "fp32", ("incremental", "prefill"))
    change = crossed["answer_disagreement"]
    assert (change["bf16_only"], change["fp32_only"], change["difference_points"]) == (6, 1, -50.0)
    assert change["mcnemar_p"] == pytest.approx(0.125)  # two-sided binomial, 1 of 7
    assert crossed["logits_disagreement"]["mcnemar_p"] == 1.0
    # accuracy effect: -6 of 10 in BF16, -1 of 10 in FP32
    assert crossed["accuracy_difference_of_differences"]["difference_points"] == pytest.approx(50.0)
    assert crossed["prefix_identity"]["count"] == 10
    other = [*rows[:10], *synthetic("fp32", [False] * 10, prefix=1)]
    assert cross_precision(other, "bf16", "fp32", ("incremental", "prefill"))["prefix_identity"]["count"] == 0
    assert fixed_prefix.crossing_fault(crossed) == "" == fixed_prefix.crossing_fault(None)
    # the same tokens in both precisions, other roles or mask rows for one arm of one row
    rows[12]["arms"]["prefill"]["boundary_state_sha256"] = "other"
    crossed = cross_precision(rows, "bf16", "fp32", ("incremental", "prefill"))
    assert crossed["prefix_identity"]["count"] == 10 and crossed["functional_state_identity"]["count"] == 9
    assert fixed_prefix.crossing_fault(crossed) == "bf16 and fp32 hold one functional state on 9 of 10 rows only"
    closed = cross_precision([{**row, "arms": {}} for row in rows], "bf16", "fp32", ("incremental", "prefill"))
    assert closed["rows"] == 0 and len(closed) == 4 and fixed_prefix.crossing_fault(closed) == ""
    rows[3] = {"row": "r3", "dtype": "bf16", "arms": {}, "comparisons": {}}  # failed closed in one precision
    assert cross_precision(rows, "bf16", "fp32", ("incremental", "prefill"))["rows"] == 9


@pytest.mark.parametrize("arm", ["incremental", "prefill"])
def test_a_run_whose_precisions_hold_two_states_of_a_row_has_no_result(finished, arm):
    models, rows = SimpleNamespace(numeric=dict.fromkeys(("bf16", "fp32"))), ledger(finished)
    assert FixedPrefix(models, [], []).summarise(rows)["passed"]
    rows[-1]["arms"][arm]["boundary_state_sha256"] = "0" * 64
    summary = FixedPrefix(models, [], []).summarise(rows)
    assert not summary["passed"] and all(row["passed"] for row in rows)
    assert summary["no_result"] == f"bf16 and fp32 hold one functional state on {ROWS - 1} of {ROWS} rows only"


def test_an_interrupted_run_resumes_to_the_same_bytes_in_either_precision(study, finished, tmp_path):
    """Interrupted in each, one row at a time, the last line torn (case 24); ended with as many as the run chooses."""
    rows, whole = tmp_path / "rows.jsonl", (finished / "rows.jsonl").read_bytes()
    for done in (2, ROWS):
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, "experiments.fixed_prefix", "incremental_steps", done)
            stopped = run(study, "fixed_prefix", tmp_path, "--batch-size", 1, expected=130)
        assert "resume with: python -m experiments.fixed_prefix" in stopped.stderr
        kept = rows.read_bytes()
        assert 0 < len(kept) < len(whole) and whole.startswith(kept), "the interruption came too early or too late"
        rows.write_bytes(kept + whole[len(kept) : len(kept) + 9])
    run(study, "fixed_prefix", tmp_path)
    for file in ("rows.jsonl", "summary.json", "report.md"):
        assert (tmp_path / file).read_bytes() == (finished / file).read_bytes(), file


def test_one_precision_alone_has_no_crossing(study, finished, tmp_path):
    run(study, "fixed_prefix", tmp_path / "run", "--dtype", "fp32", "--limit", 2)
    summary = summary_of(tmp_path / "run")
    assert summary["cross_precision"] is None and list(summary["precisions"]) == ["fp32"] and summary["rows"] == 2
    mine, whole = ledger(tmp_path / "run"), ledger(finished)
    assert [row["arms"] for row in mine] == [row["arms"] for row in whole[ROWS : ROWS + 2]]
    with refused("expected bf16 rows for the whole bank, found 0"):
        open_strata(tmp_path / "run")


def test_the_preflight_holds_at_each_precision(study, tmp_path, monkeypatch):
    real = experiment.replica_exact
    monkeypatch.setattr(
        experiment, "replica_exact", lambda a, b: real(a, b) and a.boundary.cache.keys(0).element_size() == 2
    )
    for _ in range(2):  # the second time the failed row is found where the first left it
        done = run(study, "fixed_prefix", tmp_path / "run", expected=3)
        assert "preflight failed: row fp32/t000: replica_incremental, replica_prefill" in done.stdout
        assert [row["dtype"] for row in ledger(tmp_path / "run")] == ["bf16"] * 2, "no row after the preflight"
        assert not (tmp_path / "run/summary.json").exists()


def test_the_preflight_of_both_precisions_is_decoded_before_all_other_rows(study, finished, tmp_path, monkeypatch):
    order, real = [], FixedPrefix.row

    def noted(self, index, progress):
        order.append(index)
        return real(self, index, progress)

    monkeypatch.setattr(FixedPrefix, "row", noted)
    run(study, "fixed_prefix", tmp_path / "run")
    assert order == [0, 1, ROWS, ROWS + 1, *range(2, ROWS), *range(ROWS + 2, 2 * ROWS)]
    for name in ("rows.jsonl", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    assert not (tmp_path / "run/partial").exists()


def test_a_bank_whose_prefixes_changed_is_refused(finished, tmp_path):
    """Sealed anew, so that no digest of a line shows it."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    rows = ledger(finished)
    prefix = rows[2]["prefix"]
    prefix["tokens"][4] ^= 1
    rewrite(copy, rows)
    with refused("rows.jsonl row bf16/t002: SHA-256 of the", "prefix tokens"):
        open_bank(copy)
    prefix["sha256"] = token_digest(prefix["tokens"])
    rewrite(copy, rows)
    with refused("the bank that its rows hold: expected"):
        open_bank(copy)


def test_a_source_that_changed_since_is_another_run(study, finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    change = lambda rows: rows[0]["arms"]["live"].update(margin=0.5)  # noqa: E731
    source = altered(study / "runs/matrix-bf16", tmp_path / "matrix", change)
    done = call("fixed_prefix", *inputs(study, "--out", copy, "--source", source), cwd=study)
    one_line(done, "panel.bank.ledger_sha256")


def with_prefix(study, target, part):
    """Returns a copy of the matrix run in which the first row has another prefix and that prefix's digest."""

    def change(rows):
        tokens = rows[0]["prefix"]["tokens"][part]
        rows[0]["prefix"] = {"tokens": tokens, "sha256": token_digest(tokens), "length": len(tokens)}

    return altered(study / "runs/matrix-bf16", target, change)


def test_what_does_not_fit_is_refused_in_one_line(study, tmp_path):
    twice = "dtype: expected one dtype, or two different ones, found 'bf16 bf16'"
    one_line(call("fixed_prefix", *inputs(study, "--dtype", "bf16", "--dtype", "bf16"), cwd=study), twice)
    other = one_line(call("fixed_prefix", *inputs(study, checkpoint="later"), cwd=study))
    assert "later/model.safetensors: SHA-256" in other or "later/role_embedding.safetensors: SHA-256" in other
    unfinished = shutil.copytree(study / "runs/matrix-bf16", tmp_path / "unfinished")
    rewrite(unfinished, ledger(unfinished)[:-1])
    line = f"expected a finished run, found {ROWS - 1} of {ROWS} rows; make it with"
    one_line(call("fixed_prefix", *inputs(study, "--source", unfinished), cwd=study), line)
    failed = shutil.copytree(study / "runs/matrix-bf16", tmp_path / "failed")
    edit_json(failed / "summary.json", passed=False)
    [numeric] = manifest_of(failed)["numeric"]
    fp32 = shutil.copytree(study / "runs/matrix-bf16", tmp_path / "fp32")
    edit_json(fp32 / "manifest.json", numeric=[{**numeric, "dtype": "fp32"}])
    foreign = shutil.copytree(study / "runs/matrix-bf16", tmp_path / "foreign")
    edit_json(foreign / "manifest.json", checkpoint=...)
    for source, line in (
        (foreign, "foreign/manifest.json: expected the field 'checkpoint', found none"),
        (failed, "expected a run whose gates all passed, found failed rows; make it with"),
        (fp32, "expected a bf16 run, found fp32; make it with"),
        (with_prefix(study, tmp_path / "one", slice(1, None)), "prefix of row t000: token 0: "),
        (with_prefix(study, tmp_path / "two", slice(-1)), "expected an end right after merge's opening delimiter"),
    ):
        one_line(call("fixed_prefix", *inputs(study, "--source", source), cwd=study), line)
    assert not (tmp_path / "runs").exists()
