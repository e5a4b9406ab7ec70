"""audit: two ledgers joined by row; everything agrees, or exit code 3 says what does not."""

import shutil

import pytest

from experiments.audit import audit_row, joined_arms
from experiments.run.ledger import leaves
from tests.experiments.runs import ROWS, altered, call, change_at, ledger, manifest_of, one_line, open_finished, rename
from tests.helpers import edit_json

MATRIX, FIXED = "runs/matrix-bf16", "runs/fixed_prefix-bf16-fp32"
JOINED = "comparisons.incremental:prefill"


def audit(study, *arguments, expected=0):
    done = call("audit", *arguments, cwd=study)
    assert done.exit_code == expected, (done.exit_code, done.output)
    return done


def with_numeric(source, target, **changes):
    """A copy of a run whose manifest states other numeric settings."""
    shutil.copytree(source, target)
    first, *rest = manifest_of(target)["numeric"]
    edit_json(target / "manifest.json", numeric=[{**first, **changes}, *rest])
    return target


def test_the_matrix_and_the_fixed_prefix_run_agree_on_everything(study):
    before = sorted(study.rglob("*"))
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
        assert f"\n{ROWS}/{ROWS}  {check}" in f"\n{done.stdout}", check
    assert sorted(study.rglob("*")) == before, "without --out nothing is written"
    audit(study, FIXED, MATRIX)


def test_leaves_are_counted(study, tmp_path):
    out = tmp_path / "out"
    audit(study, MATRIX, FIXED, "--out", out)
    manifest, _, summary = open_finished(out)
    assert manifest["row_order"] == [f"bf16/t{i:03d}" for i in range(ROWS)] and summary["passed"]
    matrix = leaves(ledger(study / MATRIX)[0]["comparisons"]["live:prefill"]["cache"])
    scalars = sum(not path.startswith("first_difference") for path in matrix)
    counts = {"shared": [len(matrix)] * 2, "scalars": [scalars] * 2, "unshared": 0}
    assert scalars < len(matrix) and summary["leaves"]["cache live:prefill"] == counts
    assert summary["joined"]["live"] == "incremental"
    first = {name: (out / name).read_bytes() for name in ("rows.jsonl", "summary.json", "report.md")}
    for kept in (len(first["rows.jsonl"]), len(first["rows.jsonl"]) // 2):  # again, and completed after a cut
        (out / "rows.jsonl").write_bytes(first["rows.jsonl"][:kept])
        audit(study, MATRIX, FIXED, "--out", out)
        assert {name: (out / name).read_bytes() for name in first} == first


@pytest.mark.parametrize(
    ("row", "path", "change", "checks"),
    [
        (2, "arms.incremental.suffix.3", lambda token: token ^ 1, ["leaves arm live", "suffix live:incremental"]),
        (1, "arms.prefill.cache_sha256", lambda d: d[::-1], ["leaves arm prefill", "cache_sha256 prefill:prefill"]),
        (0, f"{JOINED}.cache.layers.1.key.delta_l2", lambda x: x * (1 + 2**-52), ["leaves cache live:prefill"]),
        (3, "prefix.tokens", lambda tokens: [*tokens, 65], ["prefix"]),
        (0, f"{JOINED}.suffix.exact", lambda exact: not exact, ["leaves comparison live:prefill"]),
    ],
)
def test_one_changed_leaf_ends_with_code_3(study, tmp_path, row, path, change, checks):
    changed = altered(study / FIXED, tmp_path / "altered", lambda rows: change_at(rows[row], path, change))
    done = audit(study, MATRIX, changed, "--out", tmp_path / "out", expected=3)
    assert f"rows that disagree: bf16/t00{row}" in done.stdout
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


def test_another_order_disagrees(study, tmp_path):
    done = audit(study, altered(study / MATRIX, tmp_path / "turned", list.reverse), FIXED, expected=3)
    assert "in different orders" in done.stdout and f"{ROWS}/{ROWS} rows agree" in done.stdout


def test_another_numeric_surface_is_named(study, tmp_path):
    done = audit(study, MATRIX, with_numeric(study / MATRIX, tmp_path / "other", threads=2))
    assert "note, the numeric surfaces differ: numeric.bf16.threads: left 1, right 2" in done.stdout


def test_live_joins_incremental_only_where_each_side_lacks_the_other():
    live, incremental, both = {"live": 1}, {"incremental": 1}, {"live": 1, "incremental": 1}
    prefill = {"prefill": 1}
    joined = joined_arms({**live, **prefill}, {**incremental, **prefill})
    assert joined == {"live": "incremental", "prefill": "prefill"}
    assert joined_arms(both, incremental) == {"incremental": "incremental"}
    assert joined_arms(live, both) == {"live": "live"}


def test_another_audit_is_refused_there_unless_fresh(study, tmp_path):
    out = ("--out", tmp_path / "audit")
    assert audit(study, MATRIX, FIXED, *out).exit_code == 0
    assert "--fresh" in one_line(call("audit", MATRIX, MATRIX, *out, cwd=study))
    assert audit(study, MATRIX, MATRIX, *out, "--fresh").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit", "audit.1"]


def test_what_cannot_be_compared_does_not_agree(study):
    row = {"row": "a", "dtype": "bf16", "row_sha256": "", "sites": 1, "arms": {}, "comparisons": {}, "gates": {}}
    failed = {**row, "failure": "NaN"}
    assert audit_row(0, row, row)["passed"], "no row of such an experiment has arms"
    for pair in ((failed, failed), (failed, row), (row, failed)):
        assert not audit_row(0, *pair)["gates"]["arms"], "nothing of it was decoded"
    whole = ledger(study / MATRIX)[0] | {"dtype": "bf16"}
    assert audit_row(0, whole, whole)["passed"] and not audit_row(0, whole, failed)["passed"]
    other = whole | {"prefix": {"digest": whole["prefix"]["sha256"]}}
    assert not audit_row(0, whole, other)["gates"]["prefix"], "no leaf is shared"


def test_what_does_not_fit_is_refused_in_one_line(study, tmp_path):
    wide = with_numeric(study / MATRIX, tmp_path / "fp64", dtype="fp64")
    torn = shutil.copytree(study / MATRIX, tmp_path / "torn")
    (torn / "rows.jsonl").write_bytes((torn / "rows.jsonl").read_bytes()[:-5])
    others = altered(study / MATRIX, tmp_path / "others", rename)
    for run, part in (
        (others, "found none of them"),
        ("nowhere", "expected a run directory, found nothing"),
        (wide, "expected a precision of"),
        (torn, "expected a finished run"),
    ):
        one_line(call("audit", run, FIXED, cwd=study), part)


def test_a_terminals_control_sequence_in_an_id_is_shown_as_its_escape(study, tmp_path):
    """Ids come out of files that others wrote."""
    escape, shown = "t\x1b]0;owned\x07", "t\\x1b]0;owned\\x07"

    def rename(rows):
        rows[0]["row"] = escape
        rows[0]["arms"]["live"]["suffix"][0] ^= 1

    hostile = altered(study / MATRIX, tmp_path / "hostile", rename)
    twin = altered(hostile, tmp_path / "twin", lambda rows: rows[0]["arms"]["live"]["suffix"].append(1))
    crossed = call("crosscheck", hostile, twin, "--no-rerun", cwd=study)
    assert crossed.exit_code == 3
    for done in (audit(study, hostile, MATRIX, expected=3), crossed):
        assert shown in done.output and "\x1b" not in done.output
