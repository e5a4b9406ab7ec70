"""The matrix end to end on the tiny checkpoint: arms, manifest, gates, exit codes."""

import pytest

import experiments.run.experiment as experiment
from tests.experiments.runs import CAPS, ROWS, call, inputs, manifest_of, one_line, open_finished, summary_of


def arguments(study, *more):
    return ["--dtype", "bf16", *inputs(study), "--preflight", 2, *more]


@pytest.fixture(scope="module")
def finished(study):
    return study / "runs/matrix-bf16"


def test_the_arms_differ_as_their_constructions_do(finished):
    _, rows, summary = open_finished(finished)
    for row in rows:
        assert set(row["comparisons"]) == {"live:live_replica", "prefill:prefill_replica", "live:prefill"}
        cache = row["comparisons"]["live:prefill"]["cache"]
        assert not cache["exact"] and 0 < cache["relative_l2"] < 0.1
        assert row["comparisons"]["live:live_replica"]["cache"]["differing"] == 0
        assert row["arms"]["live"]["cache_sha256"] == row["arms"]["live_replica"]["cache_sha256"]
        assert row["arms"]["live"]["cache_sha256"] != row["arms"]["prefill"]["cache_sha256"]
        for arm in row["arms"].values():
            assert arm["logits_geometry"]["shape"] == [2, 288] and arm["logits_geometry"]["dtype"] == "bfloat16"
            assert arm["logits_geometry"]["device"] == "cpu" and len(arm["logits_geometry"]["stride"]) == 2
            # every suffix token but the one that ends the answer was fed
            assert arm["post_decode_length"] == row["prefix"]["length"] + len(arm["suffix"]) - 1
    assert summary["suffix_disagreement"]["n"] == ROWS
    assert (finished / "report.md").read_text().startswith("# matrix, bf16")
    assert len((finished / "timing.jsonl").read_text().splitlines()) == ROWS


def test_the_manifest_names_everything_that_decides_a_bit(finished):
    manifest = manifest_of(finished)
    assert manifest["numeric"][0]["dtype"] == "bf16" and manifest["numeric"][0]["threads"] == 1
    assert manifest["numeric"][0]["attention"] == "repeat_kv" and manifest["numeric"][0]["linear"] == "plain"
    assert manifest["environment"]["torch"]
    files = ("config.json", "contract.json", "model.safetensors", "role_embedding.safetensors", "tokenizer.json")
    assert tuple(sorted(manifest["checkpoint"])) == files
    assert manifest["caps"] == CAPS
    plan = manifest["plan"]
    assert plan["uncertainty"]["bootstrap_seed"] == 20260728 and plan["uncertainty"]["bootstrap_replicates"] == 20_000
    assert plan["uncertainty"]["bootstrap_streams"]["cross_suffix"] == 20
    assert plan["uncertainty"]["matrix_wilson_z"] == 1.96
    assert plan["interpretation"]["least_divergent"] == 12 and plan["interpretation"]["least_exact"] == 6
    assert plan["interpretation"]["precedence"][0] == "procedural-control failure"
    decode = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "copies": 2}
    assert {key: plan["decode"][key] for key in decode} == decode


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--checkpoint", "nowhere"), "nowhere: expected a file, found nothing|nowhere"),
        (("--tasks", "nowhere.jsonl"), "nowhere.jsonl: expected a file, found nothing"),
        (("--device", "tpu"), "device: expected cpu, cuda or cuda:N, found 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(study, tmp_path, more, message):
    line = one_line(call("matrix", *arguments(study, *more), cwd=tmp_path))
    assert any(part in line for part in message.split("|"))
    assert not (tmp_path / "runs").exists(), "nothing is written for refused input"


def test_a_gate_that_fails_ends_the_run_with_code_3(study, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "replica_exact", lambda left, right: left.boundary.construction != "prefill")
    for preflight, rows in ((2, 1), (0, ROWS)):
        given = arguments(study, "--preflight", preflight, "--out", f"p{preflight}")
        done = call("matrix", *given, cwd=tmp_path)
        assert done.exit_code == 3, done.output
        assert (tmp_path / f"p{preflight}/rows.jsonl").read_bytes().count(b"\n") == rows
    assert f"gates FAILED on {ROWS} rows; endpoints withheld: gates failed on {ROWS} of {ROWS} rows" in done.stdout
    assert "disagree" not in done.stdout, "an endpoint of a failed run"
    summary = summary_of(tmp_path / "p0")
    assert summary["no_result"].endswith(f"endpoints are over {ROWS} rows") and not summary["passed"]
    assert f"gates failed on {ROWS} of {ROWS} rows" in (tmp_path / "p0/report.md").read_text()
