"""audit: two ledgers joined by row; everything agrees, or exit code 3 says what does not."""

import json
import shutil

import pytest

from experiments.audit import joined_arms
from experiments.run.ledger import leaves
from tests.experiments.runs import ROWS, altered, call, ledger, one_line, open_finished

MATRIX, FIXED = "runs/matrix-bf16", "runs/fixed_prefix-bf16-fp32"


def audit(study, *arguments, expected=0):
    done = call("audit", *arguments, cwd=study)
    assert done.exit_code == expected, (done.exit_code, done.output)
    return done


def test_the_matrix_and_the_fixed_prefix_run_agree_on_everything(study, tmp_path):
    before = sorted(path for path in study.rglob("*"))
    done = audit(study, MATRIX, FIXED)
    assert done.stdout.splitlines()[-1] == f"audit bf16: {ROWS}/{ROWS} rows agree; the runs agree"
    for check in (
        "prefix",
        "suffix live:incremental",
        "suffix live_replica:incremental_replica",
        "suffix prefill:prefill",
        "cache_sha256 live:incremental",
        "logits_sha256 prefill_replica:prefill_replica",
        "leaves cache live:prefill",
        "leaves logits live:live_replica",
        "leaves comparison prefill:prefill_replica",
    ):
        assert any(line.startswith(f"{ROWS}/{ROWS}  {check}") for line in done.stdout.splitlines()), check
    assert sorted(path for path in study.rglob("*")) == before, "without --out nothing is written"
    # the other way round the same holds
    audit(study, FIXED, MATRIX)


def test_leaves_are_counted(study, tmp_path):
    audit(study, MATRIX, FIXED, "--out", tmp_path / "out")
    manifest, _, summary = open_finished(tmp_path / "out")
    assert manifest["row_order"] == [f"bf16/t{i:03d}" for i in range(ROWS)] and summary["passed"]
    matrix = ledger(study / MATRIX)[0]["comparisons"]["live:prefill"]["cache"]
    scalars = sum(not path.startswith("first_difference") for path in leaves(matrix))
    assert scalars < len(leaves(matrix)) and summary["leaves"]["cache live:prefill"] == {
        "shared": [len(leaves(matrix))] * 2,
        "scalars": [scalars] * 2,
        "unshared": 0,
    }
    assert summary["joined"]["live"] == "incremental"
    # again: the rows are kept, the bytes are the same
    first = {name: (tmp_path / "out" / name).read_bytes() for name in ("rows.jsonl", "summary.json", "report.md")}
    audit(study, MATRIX, FIXED, "--out", tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in first} == first
    # a torn audit is completed to the same bytes
    (tmp_path / "out/rows.jsonl").write_bytes(first["rows.jsonl"][: len(first["rows.jsonl"]) // 2])
    audit(study, MATRIX, FIXED, "--out", tmp_path / "out")
    assert (tmp_path / "out/rows.jsonl").read_bytes() == first["rows.jsonl"]


def flip_token(rows):
    rows[2]["arms"]["incremental"]["suffix"][3] ^= 1


def flip_digest(rows):
    digest = rows[1]["arms"]["prefill"]["cache_sha256"]
    rows[1]["arms"]["prefill"]["cache_sha256"] = digest[:-1] + ("0" if digest[-1] != "0" else "1")


def nudge_leaf(rows):
    rows[0]["comparisons"]["incremental:prefill"]["cache"]["layers"][1]["key"]["delta_l2"] *= 1 + 2**-52


def lengthen_prefix(rows):
    rows[3]["prefix"]["tokens"].append(65)


def turn_object(rows):
    rows[0]["comparisons"]["incremental:prefill"]["suffix"]["exact"] ^= True


@pytest.mark.parametrize(
    ("change", "row", "checks"),
    [
        (flip_token, "t002", ["leaves arm live", "suffix live:incremental"]),
        (flip_digest, "t001", ["leaves arm prefill", "cache_sha256 prefill:prefill"]),
        (nudge_leaf, "t000", ["leaves cache live:prefill"]),
        (lengthen_prefix, "t003", ["prefix"]),
        (turn_object, "t000", ["leaves comparison live:prefill"]),
    ],
)
def test_one_changed_leaf_ends_with_code_3(study, tmp_path, change, row, checks):
    done = audit(
        study, MATRIX, altered(study / FIXED, tmp_path / "altered", change), "--out", tmp_path / "out", expected=3
    )
    assert f"rows that disagree: bf16/{row}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"audit bf16: {ROWS - 1}/{ROWS} rows agree; the runs DISAGREE"
    (failed,) = [entry for entry in ledger(tmp_path / "out") if not entry["passed"]]
    assert [check for check, passed in failed["gates"].items() if not passed] == checks
    assert failed["differing_leaves"] == 1 and len(failed["differing"]) == 1


def test_another_precision_is_not_joined(study, tmp_path):
    def change(rows):
        for row in rows:
            if row["dtype"] == "fp32":
                row["arms"]["incremental"]["suffix"][0] ^= 1

    done = audit(study, MATRIX, altered(study / FIXED, tmp_path / "altered", change))
    assert "note, not joined, for only one run has them: fp32" in done.stdout


def test_a_row_of_one_run_alone_disagrees(study, tmp_path):
    short = altered(study / MATRIX, tmp_path / "short", lambda rows: rows.pop())
    done = audit(study, short, FIXED, expected=3)
    assert f"rows of the right run alone: 1, bf16/t00{ROWS - 1}" in done.stdout


def test_another_order_disagrees(study, tmp_path):
    turned = altered(study / MATRIX, tmp_path / "turned", lambda rows: rows.reverse())
    done = audit(study, turned, FIXED, expected=3)
    assert "in different orders" in done.stdout and f"{ROWS}/{ROWS} rows agree" in done.stdout


def test_another_numeric_surface_is_named(study, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(study / MATRIX, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["numeric"][0]["threads"] = 2
    (other / "manifest.json").write_text(json.dumps(manifest))
    done = audit(study, MATRIX, other)
    assert "note, the numeric surfaces differ: numeric.bf16.threads: left 1, right 2" in done.stdout


def test_live_joins_incremental_only_where_each_side_lacks_the_other():
    assert joined_arms({"live": 1, "prefill": 1}, {"incremental": 1, "prefill": 1}) == {
        "live": "incremental",
        "prefill": "prefill",
    }
    assert joined_arms({"live": 1, "incremental": 1}, {"incremental": 1}) == {"incremental": "incremental"}
    assert joined_arms({"live": 1}, {"live": 1, "incremental": 1}) == {"live": "live"}


def test_what_does_not_fit_is_refused_in_one_line(study, tmp_path):
    assert "expected a run directory, found nothing" in one_line(call("audit", "nowhere", FIXED, cwd=study))
    shutil.copytree(study / MATRIX, tmp_path / "fp32")
    manifest = json.loads((tmp_path / "fp32/manifest.json").read_text())
    manifest["numeric"][0]["dtype"] = "fp64"
    (tmp_path / "fp32/manifest.json").write_text(json.dumps(manifest))
    done = call("audit", tmp_path / "fp32", FIXED, cwd=study)
    assert "expected a precision of" in one_line(done)
    path = study / MATRIX
    torn = tmp_path / "torn"
    shutil.copytree(path, torn)
    (torn / "rows.jsonl").write_bytes((torn / "rows.jsonl").read_bytes()[:-5])
    assert "expected a finished run" in one_line(call("audit", torn, FIXED, cwd=study))


def test_a_terminals_control_sequence_in_an_id_is_shown_as_its_escape(study, tmp_path):
    """Ids come out of files that somebody else wrote."""
    escape, shown = "t\x1b]0;owned\x07", "t\\x1b]0;owned\\x07"

    def rename(rows):
        rows[0]["row"] = escape
        rows[0]["arms"]["live"]["suffix"][0] ^= 1

    hostile = altered(study / MATRIX, tmp_path / "hostile", rename)
    done = audit(study, hostile, MATRIX, expected=3)
    assert shown in done.output and "\x1b" not in done.output
    twin = altered(hostile, tmp_path / "twin", lambda rows: rows[0]["arms"]["live"]["suffix"].append(1))
    crossed = call("crosscheck", hostile, twin, "--no-rerun", cwd=study)
    assert crossed.exit_code == 3 and shown in crossed.output and "\x1b" not in crossed.output
