"""The published claims: every leaf of the real release and of a synthetic one, and what is refused."""

import csv
import json
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from stats.errors import StatsInputError
from stats.published.claims import MISSING, recompute, recomputed
from stats.published.selection import rederive_panels
from tests.experiments.runs import call, one_line
from tests.helpers import read_json
from tests.stats.synthetic import ROWS, SIZES


def edit(path, old, new, count=1):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def claims_of(directory):
    published, plan = (
        json.loads((directory / name).read_text("utf-8-sig")) for name in ("paper_claims.json", "analysis_plan.json")
    )
    return recompute(published, plan, directory / "data")


def differing(directory):
    return [claim.name for claim in claims_of(directory) if not claim.equal]


def test_every_published_claim_is_reproduced_exactly(published):
    claims = claims_of(published)
    assert len(claims) == 331
    assert [claim for claim in claims if not claim.equal] == []


def test_every_published_panel_is_selected_again(published):
    panels = {panel.name: panel for panel in rederive_panels(published / "data")}
    assert [len(panel.published) for panel in panels.values()] == [12, 24, 8, 48]
    for panel in panels.values():
        assert panel.lengths_equal
        assert panel.differing == panel.tied
        assert panel.passed
    assert not panels["transplant_primary.exact"].differing


def test_a_panel_in_which_a_tie_is_no_longer_explained_fails(published, tmp_path):
    (tmp_path / "data").mkdir()
    for file in (published / "data").iterdir():
        (tmp_path / "data" / file.name).write_bytes(file.read_bytes())
    edit(tmp_path / "data" / "live_teacher_bridge.csv", "r0144", "r0121")
    assert not any(panel.passed for panel in rederive_panels(tmp_path / "data") if panel.differing)


def cells(release, file, **wanted):
    """The rows of a file with these cells, as text."""
    with (release / "data" / f"{file}.csv").open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if wanted.items() <= row.items()]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("file", "left"), [("matched_live_prefill", "live"), ("fixed_prefix_2x2", "incremental")])
def test_a_matrix_is_counted_cell_by_cell(release, file, left, precision):
    rows, claims = cells(release, file, precision=precision), recomputed(release / "data")[file][precision]
    labels = Counter((row[f"{left}_correct"], row["prefill_correct"]) for row in rows)
    differ = {part: [row[f"{part}_equal"] for row in rows].count("false") for part in ("suffix", "merge", "answer")}
    assert {part: claims[f"{part}_disagreement"]["count"] for part in differ} == differ
    only_left, only_prefill = labels["true", "false"], labels["false", "true"]
    assert (claims[f"{left}_only_correct"], claims["prefill_only_correct"]) == (only_left, only_prefill)
    assert claims["correctness_label_disagreement"]["count"] == only_left + only_prefill > 0
    assert claims["accuracy_delta_prefill_minus_left_pp"] == pytest.approx(2.5 * (only_prefill - only_left))
    indices = [int(row["first_suffix_divergence_index"]) for row in rows if row["first_suffix_divergence_index"]]
    spread = {"n": len(indices), "median": median(indices), "min": min(indices), "max": max(indices)}
    assert claims["first_divergence"] == spread and len(indices) == differ["suffix"]
    for column in SIZES:
        assert claims[f"{column}_median"] == median(float(row[column]) for row in rows)


def test_precisions_and_panels_are_counted_cell_by_cell(release):
    claims = recomputed(release / "data")
    low, high = (cells(release, "fixed_prefix_2x2", precision=precision) for precision in ("bf16", "fp32"))
    pairs = Counter((a["answer_equal"], b["answer_equal"]) for a, b in zip(low, high, strict=True))
    found = claims["fixed_prefix_2x2"]["cross_precision"]["answer_mismatch"]
    assert (found["bf16_only"], found["fp32_only"]) == (pairs["false", "true"], pairs["true", "false"])
    assert found["bf16_count"] == found["bf16_only"] + pairs["false", "false"]
    later = {
        name: (one["count"], one["n"]) for name, one in claims["transplant_later"].items() if isinstance(one, dict)
    }
    assert later == {
        "baseline_divergence": (3, 4),
        "incremental_cache_into_prefill_donor_recovery": (3, 3),
        "prefill_cache_into_incremental_donor_recovery": (2, 3),
        "bidirectional_donor_recovery": (2, 3),
        "exact_control_novel_trajectory": (1, 1),
    }
    assert claims["prospective_bridge"]["live_matches_historical_prefix_rows"] == 1
    assert claims["stock_qwen_diagnostic"]["singleton_pair_token_exact_rows"] == 3
    assert claims["historical_bridge"]["rows"] == claims["historical_bridge"]["audit_pass_rows"] == ROWS


def test_a_claim_of_another_value_type_or_place_differs(release):
    assert differing(release) == []
    path = release / "paper_claims.json"
    claims = read_json(path)
    claims["stock_qwen_diagnostic"]["rows"] = 5.0
    claims["transplant_later"]["extra"] = 1
    del claims["transplant_later"]["baseline_exact_rows"]
    interval = claims["fixed_prefix_2x2"]["bf16"]["suffix_disagreement"]["wilson_95_ci"]
    interval[0] = interval[0] * (1 + 2**-52)
    path.write_text(json.dumps(claims))
    assert [claim for claim in claims_of(release) if not claim.equal] == [
        ("fixed_prefix_2x2.bf16.suffix_disagreement.wilson_95_ci[0]", interval[0], pytest.approx(interval[0])),
        ("stock_qwen_diagnostic.rows", 5.0, 5),
        ("transplant_later.baseline_exact_rows", MISSING, 1),
        ("transplant_later.extra", 1, MISSING),
    ]


NORMS = "cache_left_l2_norm,cache_right_l2_norm,cache_delta_l2_norm"
OTHER_NORMS = "cache_delta_l2_norm,cache_right_l2_norm,cache_left_l2_norm"
HEADER = "suffix_equal,first_suffix_divergence_index,trace_equal,merge_equal"
SWAPPED = "merge_equal,first_suffix_divergence_index,trace_equal,suffix_equal"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("matched_live_prefill.csv", "r0000,bf16", "r0000,fp16", "expected precision bf16 or fp32, found 'fp16'"),
        ("matched_live_prefill.csv", "r0001,bf16", "r0000,bf16", "once, found"),
        ("matched_live_prefill.csv", "functional_state_equal", "state", "expected column 'functional_state_equal'"),
        ("matched_live_prefill.csv", "r0001,bf16", "r0099,bf16", "expected the same row ids in both precisions"),
        ("kv_transplant_later.csv", "true", "yes", "expected true or false, found 'yes'"),
        ("kv_transplant_later.csv", "exact_control_novel_trajectory", "row_id", "distinct column names"),
        ("live_teacher_bridge.csv", "r0000,0,", "r0000,0,1,", "cells, found"),
        ("fixed_prefix_2x2.csv", HEADER, SWAPPED, "column suffix_equal: expected false"),
        ("fixed_prefix_2x2.csv", NORMS, OTHER_NORMS, "(from its norms)"),
        ("kv_transplant_primary.csv", "nondivergent", "other", "expected the strata divergent and nondivergent"),
        ("historical_bridge_audit.csv", "90", "91", "expected one value in all rows, found [90, 91]"),
        ("historical_bridge_audit.csv", "90", "-9", "expected a whole number, found '-9'"),
        ("stock_qwen_control.csv", "false,false,7,0", "false,false,,0", "found 'false'"),
    ],
)
def test_malformed_or_contradicting_ledgers_are_refused_in_one_line(release, file, old, new, says):
    edit(release / "data" / file, old, new)
    with pytest.raises(StatsInputError) as caught:
        claims_of(release)
        rederive_panels(release / "data")
    message = str(caught.value)
    assert says in message and file in message and "\n" not in message


DERIVED = {  # cells that follow from others of their row, or that a verdict of the row follows from
    **{
        name: f"suffix_equal {arm}_replica_suffix_exact {arm}_replica_cache_exact {arm}_replica_logits_exact "
        "prefill_replica_suffix_exact prefill_replica_cache_exact prefill_replica_logits_exact "
        "functional_state_equal all_storage_disjoint integrity_pass"
        for name, arm in (("matched_live_prefill", "live"), ("fixed_prefix_2x2", "incremental"))
    },
    "live_teacher_bridge": "live_clone_cache_exact live_clone_logits_exact teacher_clone_cache_exact "
    "teacher_clone_logits_exact functional_state_equal all_storage_disjoint all_48_layers_exact "
    "live_teacher_suffix_exact live_matches_historical_prefix",
    "historical_bridge_audit": "prefix_commitment_equal logits_prefill_replica_fingerprint_equal audit_pass",
    **dict.fromkeys(
        ("kv_transplant_primary", "kv_transplant_later"),
        "incremental_replica_exact prefill_replica_exact boundary_argmax_equal all_48_layer_pairs_transplanted "
        "functional_state_equal all_storage_disjoint baseline_divergent incremental_cache_into_prefill_recovers_donor "
        "prefill_cache_into_incremental_recovers_donor exact_control_novel_trajectory integrity_pass",
    ),
    "stock_qwen_control": "singleton_pair_tokens_exact singleton_pair_logprobs_exact",
}


def change_last(release, file, **changed):
    """Other cells in a file's last row."""
    rows, path = cells(release, file), release / "data" / f"{file}.csv"
    rows[-1].update(changed)
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("file", DERIVED)
def test_a_verdict_that_its_row_does_not_bear_out_is_refused(release, file):
    for column in DERIVED[file].split():
        right = cells(release, file)[-1][column]
        change_last(release, file, **{column: "false" if right == "true" else "true"})
        with pytest.raises(StatsInputError, match=f"column ({column}|integrity_pass|audit_pass): expected"):
            recomputed(release / "data")
        change_last(release, file, **{column: right})
    recomputed(release / "data")


def test_a_ratio_of_norms_is_computed_again_and_a_bridge_row_may_fail_a_gate_without_a_column(release):
    change_last(release, "live_teacher_bridge", integrity_pass="false")
    assert recomputed(release / "data")["prospective_bridge"]["integrity_pass_rows"] == 2
    change_last(release, "fixed_prefix_2x2", cache_relative_l2_diff="0.5")
    with pytest.raises(StatsInputError, match=r"column cache_relative_l2_diff: expected .* \(from its norms\)"):
        recomputed(release / "data")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("paper_claims.json", b"{"),
        ("paper_claims.json", b"[]"),
        ("paper_claims.json", b'{"schema": "stage-replay-paper-claims-v1", "schema": "stage-replay-paper-claims-v1"}'),
        ("paper_claims.json", b'{"schema": "other"}'),
        ("paper_claims.json", b'{"schema": NaN}'),
        ("paper_claims.json", b"\xff\xfe{"),
        ("paper_claims.json", b"[" * 200_000),
        ("analysis_plan.json", b"{}"),
        ("analysis_plan.json", b'{"uncertainty": {"bootstrap_seed": 1}}'),
        ("data/kv_transplant_primary.csv", b""),
        ("data/kv_transplant_primary.csv", b"row_id\n"),
        ("data/kv_transplant_primary.csv", b"row_id\n\xff\n"),
        ("data/kv_transplant_primary.csv", None),
        ("paper_claims.json", None),
    ],
)
def test_unusable_files_are_bad_input(release, file, content):
    if content is None:
        (release / file).unlink()
    else:
        (release / file).write_bytes(content)
    one_line(call("published", release), Path(file).name)


def test_command_prints_each_claim_and_its_verdict(release):
    result = call("published", release)
    assert result.exit_code == 0
    total = len(claims_of(release))
    assert sum(line.startswith("equal ") for line in result.stdout.splitlines()) == total
    assert f"claims equal: {total} of {total}" in result.stdout and "panels passed: 4 of 4" in result.stdout


def test_command_exits_3_on_a_mismatch(release):
    edit(release / "paper_claims.json", '"pair_replica_token_exact_rows": 5', '"pair_replica_token_exact_rows": 4')
    result = call("published", release, "--quiet")
    assert result.exit_code == 3
    lines = [line for line in result.stdout.splitlines() if line.startswith(("equal", "DIFFERS"))]
    assert lines == ["DIFFERS  " + lines[0][9:]] and "published 4  recomputed 5" in lines[0]
    as_json = call("published", release, "--json")
    assert as_json.exit_code == 3
    wrong = [claim for claim in json.loads(as_json.stdout)["claims"] if not claim["equal"]]
    assert [claim["claim"] for claim in wrong] == ["stock_qwen_diagnostic.pair_replica_token_exact_rows"]


def test_command_exits_3_on_another_selection(release):
    edit(release / "data" / "live_teacher_bridge.csv", ",1,", ",7,")
    edit(release / "data" / "live_teacher_bridge.csv", ",2,", ",1,")
    result = call("published", release)
    assert result.exit_code == 3 and "panel bridge: lengths DIFFER" in result.stdout
