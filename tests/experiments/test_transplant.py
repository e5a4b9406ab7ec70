"""transplant on a tiny checkpoint: strata frozen first, the donor's cache in the recipient, donor endpoints."""

import pytest

import experiments.transplant as transplant
from experiments.run.inputs import Bank
from experiments.run.tasks import Prefix
from stats.intervals import Z_TRANSPLANT, wilson
from tests.experiments.runs import (
    ROWS,
    altered,
    call,
    inputs,
    ledger,
    manifest_of,
    one_line,
    open_finished,
    run,
    summary_of,
)
from tests.helpers import edit_json

BF16 = ("--dtype", "bf16")


@pytest.fixture(scope="module")
def finished(every_run):
    out, printed = every_run["transplant"], every_run.printed["transplant"]
    assert "both transplants recover the donor" in printed and "Fewer rows than the design wants" in printed
    return out


@pytest.fixture(scope="module")
def strata(study):
    rows = ledger(study / "runs/fixed_prefix-bf16-fp32")[:ROWS]
    return {
        row["row"]: "exact" if row["comparisons"]["incremental:prefill"]["suffix"]["exact"] else "divergent"
        for row in rows
    }


def test_no_task_is_read(finished):
    assert manifest_of(finished)["tasks_sha256"] is None
    assert "--tasks" not in call("transplant", "--help").output


def test_a_transplant_is_the_donors_cache_under_the_recipients_logits(finished):
    for row in ledger(finished):
        arms = row["arms"]
        for arm, donor, recipient in (
            ("incremental_cache_into_prefill", "incremental", "prefill"),
            ("prefill_cache_into_incremental", "prefill", "incremental"),
        ):
            assert arms[arm]["cache_sha256"] == arms[donor]["cache_sha256"] != arms[recipient]["cache_sha256"]
            assert arms[arm]["logits_sha256"] == arms[recipient]["logits_sha256"]
            assert arms[arm]["boundary_state_sha256"] == arms[recipient]["boundary_state_sha256"]
        assert len(set(row["raw_argmax"].values())) == 1


def test_the_strata_are_those_of_the_source_and_the_endpoints_count_them(finished, strata):
    manifest, rows, summary = open_finished(finished)
    divergent = sum(stratum == "divergent" for stratum in strata.values())
    assert [entry["stratum"] for entry in manifest["panel"]["rows"]] == ["divergent"] * divergent + ["exact"] * (
        ROWS - divergent
    )
    assert {row["row"]: row["stratum"] for row in rows} == strata
    assert summary["panel"]["selected"] == {"divergent": divergent, "exact": ROWS - divergent}
    assert summary["strata"]["divergent"] == {
        "rows": divergent,
        "reproduced": wilson(divergent, divergent, Z_TRANSPLANT).as_dict(),
    }
    endpoints = summary["endpoints"]
    assert endpoints["baseline_divergence"]["count"] == divergent == endpoints["bidirectional_donor_recovery"]["n"]
    assert endpoints["exact_control_novel_trajectory"]["n"] == ROWS - divergent
    # recounted from the suffixes themselves
    recovered = sum(
        row["arms"]["incremental_cache_into_prefill"]["suffix"] == row["arms"]["incremental"]["suffix"]
        and row["arms"]["prefill_cache_into_incremental"]["suffix"] == row["arms"]["prefill"]["suffix"]
        for row in rows
        if row["stratum"] == "divergent"
    )
    assert endpoints["bidirectional_donor_recovery"]["count"] == recovered
    assert all(sum(counts.values()) == divergent for counts in summary["grid"].values())
    report = (finished / "report.md").read_text()
    assert f"{divergent} of 24 divergent rows (the source has {divergent})" in report
    assert (
        f"| incremental cache into prefill, donor | {summary['grid']['incremental_cache_into_prefill']['donor']} |"
        in report
    )


def test_the_selection_is_evenly_spaced_within_each_stratum():
    prefixes = tuple(Prefix(f"r{i:03d}", tuple(range(300 - i))) for i in range(200))
    bank = Bank(prefixes, None, {}, "")
    strata = {prefix.id: "exact" if i % 5 == 0 else "divergent" for i, prefix in enumerate(prefixes)}
    chosen = transplant.select(bank, strata)
    assert len(chosen) == 32
    for part, name in ((chosen[:24], "divergent"), (chosen[24:], "exact")):
        members = sorted(len(p) for p in prefixes if strata[p.id] == name)
        expected = [members[round(i * (len(members) - 1) / (len(part) - 1))] for i in range(len(part))]
        assert [len(p) for p in part] == expected and {strata[p.id] for p in part} == {name}


def test_a_stratum_that_is_not_reproduced_is_counted_and_fails_no_gate(study, tmp_path):
    def wrong(rows):
        rows[1]["comparisons"]["incremental:prefill"]["suffix"]["exact"] ^= True

    source = altered(study / "runs/fixed_prefix-bf16-fp32", tmp_path / "source", wrong)
    done = run(study, "transplant", tmp_path / "run", *BF16, "--source", source, tasks=False)
    assert "gates all passed" in done.stdout
    (other,) = [row for row in ledger(tmp_path / "run") if not row["stratum_reproduced"]]
    assert other["row"] == "t001" and other["passed"]
    strata = summary_of(tmp_path / "run")["strata"]
    assert strata[other["stratum"]]["reproduced"]["count"] == strata[other["stratum"]]["rows"] - 1


def test_another_source_is_refused_in_one_line(study, tmp_path):
    given = [*BF16, *inputs(study, tasks=False), "--source", study / "runs/matrix-bf16"]
    one_line(call("transplant", *given, cwd=study), "experiment: expected fixed_prefix, found 'matrix'")
    fp32 = altered(study / "runs/fixed_prefix-bf16-fp32", tmp_path / "fp32", lambda rows: rows.__delitem__(slice(ROWS)))
    edit_json(fp32 / "manifest.json", numeric=manifest_of(fp32)["numeric"][1:])
    one_line(call("transplant", *given[:-1], fp32, cwd=study), "expected bf16 rows for the whole bank, found 0")
