"""Our runs in the released columns: what is read back is what the runs' own summaries say."""

import hashlib
import json
import shutil

import pytest

from experiments.published.columns import FILES
from stats.published.ledgers import (
    bridge_claims,
    cross_precision_claims,
    matrix_claims,
    stock_claims,
    transplant_claims,
)
from stats.published.tables import read_precisions, read_rows
from tests.experiments.runs import call, ledger, one_line, rewrite
from tests.stats import synthetic

SUFFIXES = {"count", "n", "rate"}


@pytest.fixture(scope="module")
def runs(every_run):
    """One finished run of every experiment that the release has a ledger for; the matrix in both precisions."""
    return {name: path for name, path in every_run.items() if name.split("-")[0] in FILES}


@pytest.fixture(scope="module")
def data(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("release")
    options = [part for path in runs.values() for part in ("--export", path)]
    done = call("published", *options, out, cwd=out)
    assert done.exit_code == 0, done.output
    assert {path.name for path in (out / "data").iterdir()} == {name for name, _ in FILES.values()}
    return out / "data"


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def same_rate(claim, block):
    return {**{k: claim[k] for k in SUFFIXES}, "wilson_95": claim["wilson_95_ci"]} == block


@pytest.mark.parametrize(("name", "file", "left"), [
    ("matrix", "matched_live_prefill.csv", "live"),
    ("fixed_prefix", "fixed_prefix_2x2.csv", "incremental"),
])  # fmt: skip
def test_a_matrix_read_back_gives_its_summary(runs, data, name, file, left):
    split = read_precisions(data / file)
    for dtype in ("bf16", "fp32"):
        if name == "matrix":
            summary = summary_of(runs["matrix" if dtype == "bf16" else "matrix-fp32"])
        else:
            summary = summary_of(runs["fixed_prefix"])["precisions"][dtype]
        claims = matrix_claims(split[dtype], left, f"{'matched' if name == 'matrix' else 'fixed'}_{dtype}")
        assert claims["rows"] == claims["integrity_pass_rows"] == summary["rows"]
        for key in ("suffix_disagreement", "merge_disagreement"):
            assert same_rate(claims[key], summary[key]), key
        assert same_rate(claims["answer_disagreement"], summary["answer_tokens_disagreement"])
        assert same_rate(claims["correctness_label_disagreement"], summary["correctness_disagreement"])
        assert claims["first_divergence"] == summary["first_divergence"]
        assert claims["accuracy_paired_bootstrap_95_ci_pp"] == summary["accuracy"]["bootstrap_95"]
        assert claims["mcnemar_exact_two_sided_p"] == summary["accuracy"]["mcnemar_p"]
        assert claims[f"{left}_correct"] == summary["accuracy"][left]["correct"]
        assert claims["cache_exact_rows"] == summary["cache"]["exact_rows"]
        assert claims["cache_max_abs_diff_median"] == summary["cache"]["max_abs_median"]
        assert claims["logit_mean_abs_diff_median"] == summary["logits"]["mean_abs_median"]
    assert any(row.cells["suffix_equal"] == "false" for row in split["bf16"]), "nothing diverged: the test sees nothing"


def test_the_crossing_read_back_gives_its_summary(runs, data):
    claims = cross_precision_claims(read_precisions(data / "fixed_prefix_2x2.csv"), "incremental")
    crossed = summary_of(runs["fixed_prefix"])["cross_precision"]
    for claim, key in (("suffix_mismatch", "suffix_disagreement"), ("logits_mismatch", "logits_disagreement")):
        mine, theirs = crossed[key], claims[claim]
        assert theirs["bf16_count"] == mine["bf16_count"] and theirs["fp32_only"] == mine["fp32_only"]
        assert theirs["paired_bootstrap_95_ci_pp"] == mine["bootstrap_95"]
        assert theirs["mcnemar_exact_two_sided_p"] == mine["mcnemar_p"]


@pytest.mark.parametrize(("name", "file"), [
    ("transplant", "kv_transplant_primary.csv"), ("replication", "kv_transplant_later.csv"),
])  # fmt: skip
def test_transplants_read_back_give_their_endpoints(runs, data, name, file):
    claims, endpoints = transplant_claims(read_rows(data / file)), summary_of(runs[name])["endpoints"]
    assert claims["rows"] == claims["integrity_pass_rows"] == endpoints["rows"]
    assert claims["baseline_exact_rows"] == endpoints["baseline_exact_rows"]
    for key, block in endpoints.items():
        if isinstance(block, dict):
            assert same_rate(claims[key], block if block["n"] else {**block, "wilson_95": [None, None]}), key


def checked(directory):
    """Exit code of `experiments.published DIR`, and every claim and panel that it found."""
    done = call("published", directory, "--json", cwd=directory)
    return done.exit_code, json.loads(done.stdout)


def test_a_whole_export_passes_the_releases_own_checks(data):
    code, found = checked(data.parent)
    assert code == 0, [claim for claim in found["claims"] if not claim["equal"]]
    assert {claim["claim"].split(".")[0] for claim in found["claims"]} == {
        *("matched_live_prefill", "fixed_prefix_2x2", "prospective_bridge", "historical_bridge"),
        *("transplant_primary", "transplant_later", "stock_qwen_diagnostic"),
    }
    assert len(found["claims"]) > 200 and all(panel["passed"] for panel in found["panels"])


def test_its_claims_have_the_releases_names(data, tmp_path):
    """Against a release that is written by other code: the same claims, leaf by leaf."""
    release = synthetic.write_release(tmp_path / "release")
    names = [{claim["claim"] for claim in checked(directory)[1]["claims"]} for directory in (data.parent, release)]
    assert names[0] == names[1]


@pytest.mark.parametrize("file", sorted(name for name, _ in FILES.values()))
def test_a_changed_column_of_an_export_is_noticed(data, tmp_path, file):
    other = tmp_path / "other"
    shutil.copytree(data.parent, other)
    path = other / "data" / file
    header, first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([header, *rest]) + "\n")  # a row less
    assert call("published", other, cwd=tmp_path).exit_code in (2, 3), first


def test_a_summary_that_its_own_rows_do_not_bear_out_is_noticed(runs, tmp_path):
    """The claims come from the summaries and are recomputed from the columns: two ways to each number."""
    other = tmp_path / "other"
    shutil.copytree(runs["matrix"], other)
    summary = summary_of(other)
    summary["suffix_disagreement"]["count"] += 1
    (other / "summary.json").write_text(json.dumps(summary))
    paths = [other if name == "matrix" else path for name, path in runs.items()]
    options = [part for path in paths for part in ("--export", path)]
    assert call("published", *options, tmp_path / "out", cwd=tmp_path).exit_code == 0
    code, found = checked(tmp_path / "out")
    assert code == 3
    differing = {claim["claim"] for claim in found["claims"] if not claim["equal"]}
    names = ("suffix_disagreement.count", "trace_disagreement.count")
    assert differing == {f"matched_live_prefill.bf16.{name}" for name in names}


def test_the_plan_is_the_manifests(runs, data):
    plan = json.loads((data.parent / "analysis_plan.json").read_text())
    manifest = json.loads((runs["matrix"] / "manifest.json").read_text())
    assert plan["uncertainty"] == manifest["plan"]["uncertainty"]
    order = "".join(f"{row}\n" for row in manifest["row_order"])
    assert plan["population"]["item_order_sha256"] == hashlib.sha256(order.encode()).hexdigest()
    assert plan["population"]["rows"] == len(manifest["row_order"])


def test_a_part_of_a_study_has_no_claims(runs, tmp_path):
    done = call("published", "--export", runs["matrix"], tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 0 and "no paper_claims.json" in done.stdout and "matrix-fp32" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


def test_the_strata_keep_the_releases_names(runs, data):
    strata = [row.text("historical_stratum") for row in read_rows(data / "kv_transplant_primary.csv")]
    counts = summary_of(runs["transplant"])["strata"]
    assert strata.count("divergent") == counts["divergent"]["rows"] > 0
    assert strata.count("nondivergent_control") == counts["exact"]["rows"] > 0


def test_bridge_and_stock_control_read_back(runs, data):
    bridge, summary = bridge_claims(read_rows(data / "live_teacher_bridge.csv")), summary_of(runs["bridge"])
    assert bridge["integrity_pass_rows"] == bridge["rows"] == summary["rows"]
    for part in ("cache", "logits", "suffix"):
        assert bridge[f"live_teacher_{part}_exact_rows"] == summary["identity"][part]["count"]
    assert bridge["live_matches_historical_prefix_rows"] == summary["saved_prefix_agreement"]["count"]
    assert bridge["new_prefix_length_range"] == [summary["prefix_length"][end] for end in ("min", "max")]
    control, summary = stock_claims(read_rows(data / "stock_qwen_control.csv")), summary_of(runs["stock_control"])
    assert control["rows"] - control["singleton_pair_token_exact_rows"] == summary["token_disagreement"]["count"]
    assert control["rows"] - control["singleton_pair_logprob_exact_rows"] == summary["logprob_disagreement"]["count"]
    assert control["pair_replica_token_exact_rows"] == control["rows"]


def test_what_cannot_be_exported_is_refused(runs, tmp_path):
    def refused(*paths):
        options = [part for path in paths for part in ("--export", path)]
        message = one_line(call("published", *options, tmp_path / "out", cwd=tmp_path))
        assert not (tmp_path / "out").exists()
        return message

    assert "each row of a precision once" in refused(runs["matrix"], runs["matrix"])
    failed = tmp_path / "failed"
    shutil.copytree(runs["matrix"], failed)
    (failed / "summary.json").write_text(json.dumps({**summary_of(failed), "passed": False, "failed_rows": ["t000"]}))
    assert "gates all passed" in refused(failed)
    other = tmp_path / "other"
    shutil.copytree(runs["matrix"], other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "experiment": "causes"}))
    assert "experiment" in refused(other)
    rewrite(other, ledger(other)[:2])
    assert "expected a finished run" in refused(other)
