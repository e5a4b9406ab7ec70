"""Our runs in the released columns: what is read back is what the runs' own summaries say."""

import hashlib
import json
import shutil

import pytest

from experiments.published.columns import FILES
from experiments.run.ledger import leaves
from stats.published.tables import read_table
from tests.experiments.runs import call, ledger, manifest_of, one_line, rewrite, summary_of
from tests.helpers import edit_json, read_json


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
    counts = {claim["claim"]: claim["recomputed"] for claim in found["claims"]}
    assert counts["matched_live_prefill.bf16.suffix_disagreement.count"] > 0, "nothing diverged: the test sees nothing"


@pytest.mark.parametrize("file", sorted(name for name, _ in FILES.values()))
def test_a_changed_column_of_an_export_is_noticed(data, tmp_path, file):
    other = tmp_path / "other"
    shutil.copytree(data.parent, other)
    path = other / "data" / file
    header, first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([header, *rest]) + "\n")  # a row less
    assert call("published", other, cwd=tmp_path).exit_code in (2, 3), first


def floats(value):
    """Every float of a nested value."""
    flat = [one for leaf in leaves(value).values() for one in (leaf if isinstance(leaf, list) else [leaf])]
    return {one for one in flat if isinstance(one, float)}


def test_every_number_of_the_claims_stands_in_the_runs_own_summaries(runs, data):
    """Two ways to each number: the claims are computed from the columns, the summaries from the rows."""
    claims = json.loads((data.parent / "paper_claims.json").read_text())
    summaries = {name: summary_of(path) for name, path in runs.items()}
    assert len(floats(claims)) > 20 and floats(claims) <= floats(summaries)
    assert not {one + 2**-40 for one in floats(claims)} & floats(summaries), "the control: other last digits"
    for dtype, name in (("bf16", "matrix"), ("fp32", "matrix-fp32")):
        found, summary = claims["matched_live_prefill"][dtype], summaries[name]
        assert found["suffix_disagreement"]["count"] == summary["suffix_disagreement"]["count"]
        assert found["answer_disagreement"]["count"] == summary["answer_tokens_disagreement"]["count"]
        assert found["live_correct"] == summary["accuracy"]["live"]["correct"]
        assert found["cache_exact_rows"] == summary["cache"]["exact_rows"]
    recovery = summaries["transplant"]["endpoints"]["bidirectional_donor_recovery"]
    assert claims["transplant_primary"]["bidirectional_donor_recovery"]["count"] == recovery["count"]
    identity = summaries["bridge"]["identity"]["cache"]["count"]
    assert claims["prospective_bridge"]["live_teacher_cache_exact_rows"] == identity


def test_an_altered_summary_does_not_reach_an_export(runs, data, tmp_path):
    """The control: an altered row is refused, as its line is sealed."""
    other = tmp_path / "other"
    shutil.copytree(runs["matrix"], other)
    block = summary_of(other)["suffix_disagreement"]
    edit_json(other / "summary.json", suffix_disagreement={**block, "count": block["count"] + 1})
    paths = [other if name == "matrix" else path for name, path in runs.items()]
    options = [part for path in paths for part in ("--export", path)]
    assert call("published", *options, tmp_path / "out", cwd=tmp_path).exit_code == 0
    assert (tmp_path / "out/paper_claims.json").read_bytes() == (data.parent / "paper_claims.json").read_bytes()
    text = (other / "rows.jsonl").read_text()
    (other / "rows.jsonl").write_text(text.replace('"exact":false', '"exact":true', 1))
    assert "expected an intact row" in one_line(call("published", *options, tmp_path / "more", cwd=tmp_path))


def test_the_plan_is_the_manifests(runs, data):
    plan = read_json(data.parent / "analysis_plan.json")
    manifest = manifest_of(runs["matrix"])
    assert plan["uncertainty"] == manifest["plan"]["uncertainty"]
    order = "".join(f"{row}\n" for row in manifest["row_order"])
    assert plan["population"]["item_order_sha256"] == hashlib.sha256(order.encode()).hexdigest()
    assert plan["population"]["rows"] == len(manifest["row_order"])


def test_a_part_of_a_study_has_no_claims(runs, tmp_path):
    done = call("published", "--export", runs["matrix"], tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 0 and "no paper_claims.json" in done.stdout and "matrix-fp32" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


def test_the_strata_keep_the_releases_names(runs, data):
    strata = read_table(data / "kv_transplant_primary.csv").text("historical_stratum")
    counts = summary_of(runs["transplant"])["strata"]
    assert strata.count("divergent") == counts["divergent"]["rows"] > 0
    assert strata.count("nondivergent_control") == counts["exact"]["rows"] > 0


def test_what_cannot_be_exported_is_refused(runs, tmp_path):
    def refused(*paths):
        options = [part for path in paths for part in ("--export", path)]
        message = one_line(call("published", *options, tmp_path / "out", cwd=tmp_path))
        assert not (tmp_path / "out").exists()
        return message

    assert "exported rows: expected each row once" in refused(runs["matrix"], runs["matrix"])
    joined = tmp_path / "joined"
    assert call("audit", runs["matrix"], runs["matrix"], "--out", joined).exit_code == 0
    assert "live arm joined with: expected incremental, found 'live'" in refused(joined)
    planned = shutil.copytree(runs["matrix"], tmp_path / "planned")
    edit_json(planned / "manifest.json", plan={})
    rest = (path for name, path in runs.items() if name != "matrix")
    assert "export: expected runs of one plan, found 2 of them" in refused(planned, *rest)
    failed = tmp_path / "failed"
    shutil.copytree(runs["matrix"], failed)
    edit_json(failed / "summary.json", passed=False, failed_rows=["t000"])
    assert "gates all passed" in refused(failed)
    other = tmp_path / "other"
    shutil.copytree(runs["matrix"], other)
    edit_json(other / "manifest.json", experiment="causes")
    assert "experiment" in refused(other)
    rewrite(other, ledger(other)[:2])
    assert "expected a finished run" in refused(other)
