"""replication on a tiny pair of checkpoints: an outcome-blind panel on another checkpoint, and the frozen label."""

import json
import shutil
from types import SimpleNamespace

import pytest

import experiments.replication as replication
import experiments.run.designs as six_arms
from decode.contract import OPEN
from experiments.run.inputs import open_bank, select_spread
from stats.donors import CHECKPOINT_SENSITIVE, CONDITIONAL, PROCEDURAL_FAILURE, STRONG, UNDERPOWERED
from tests.experiments.runs import ROWS, call, inputs, ledger, manifest_of, one_line, open_finished, run, summary_of
from tests.helpers import read_json

BF16 = ("--dtype", "bf16")


@pytest.fixture(scope="module")
def finished(every_run):
    out, printed = every_run["replication"], every_run.printed["replication"]
    assert "interpretation: " in printed and f"{ROWS} of 48 rows" in printed
    return out


def test_the_later_checkpoint_decodes_the_same_bank(study, finished):
    manifest, rows, summary = open_finished(finished)
    bank = open_bank(study / "runs/matrix-bf16")
    chosen = select_spread(bank.prefixes, ROWS)
    assert manifest["panel"]["bank"] == bank.record()
    assert [entry["row"] for entry in manifest["panel"]["rows"]] == [prefix.id for prefix in chosen]
    assert [row["prefix"]["sha256"] for row in rows] == [prefix.sha256 for prefix in chosen]
    assert manifest["checkpoint"] != bank.manifest["checkpoint"] and not summary["own_checkpoint"]
    for row in rows:
        assert "stratum" not in row
    endpoints = summary["endpoints"]
    divergent = sum(not row["comparisons"]["incremental:prefill"]["suffix"]["exact"] for row in rows)
    assert (endpoints["baseline_divergence"]["count"], endpoints["baseline_exact_rows"]) == (
        divergent,
        ROWS - divergent,
    )
    expected = (UNDERPOWERED, CHECKPOINT_SENSITIVE, PROCEDURAL_FAILURE)
    assert summary["interpretation"] in expected, "six rows can be neither strong nor conditional"


def test_the_same_weights_are_recorded(study, tmp_path):
    run(study, "replication", tmp_path / "run", *BF16, "--limit", 1, tasks=False)
    assert summary_of(tmp_path / "run")["own_checkpoint"]
    assert "this run replicates on no other checkpoint" in (tmp_path / "run/report.md").read_text()


def summary_of_rows(divergent, exact, unrecovered=0, novel=0, passed=True):
    """The summary of rows with no more than the endpoints read: suffixes 1 and 2 by construction, 3 where a transplant
    leaves both."""
    drift = {"exact": False, "relative_l2": 0.1, "max_abs": 0.1, "mean_abs": 0.1}
    rows = []
    for index in range(divergent + exact):
        same = index >= divergent
        prefill = [1] if same else [2]
        third = [3] if index < unrecovered or index >= divergent + exact - novel else [1]
        suffixes = ([1], [1], prefill, prefill, third, prefill)
        suffix = {"exact": same, "first_divergence": None if same else 0}
        pair = {"cache": drift, "logits": drift, "suffix": suffix, "argmax_equal": True}
        pair |= {"merge_equal": same, "answer_tokens_equal": same}
        arms = {name: {"suffix": suffix} for name, suffix in zip(six_arms.SixArms.arms, suffixes)}
        row = {"row": f"r{index}", "arms": arms, "comparisons": {"incremental:prefill": pair}}
        rows.append({**row, "gates": {"prefix": passed}, "passed": passed})
    panel = {"wanted": {"rows": 48}, "available": {"rows": 200}, "rows": [{}] * 48}
    decoder = SimpleNamespace(numeric=SimpleNamespace(dtype="bf16"))
    return replication.Replication(decoder, [], [], panel, False, ()).summarise(rows)


@pytest.mark.parametrize(
    ("counts", "label"),
    [
        ({"divergent": 43, "exact": 5}, CONDITIONAL),  # the paper's case
        ({"divergent": 12, "exact": 6}, STRONG),
        ({"divergent": 11, "exact": 37}, UNDERPOWERED),
        ({"divergent": 43, "exact": 5, "unrecovered": 1}, CHECKPOINT_SENSITIVE),
        ({"divergent": 42, "exact": 6, "novel": 1}, PROCEDURAL_FAILURE),
        ({"divergent": 42, "exact": 6, "passed": False}, None),
    ],
)
def test_the_label_follows_from_the_ledger(counts, label):
    summary = summary_of_rows(**counts)
    assert summary["interpretation"] == label
    recovery = summary["endpoints"]["bidirectional_donor_recovery"]
    assert recovery["n"] == counts["divergent"]
    assert recovery["count"] == counts["divergent"] - counts.get("unrecovered", 0)
    assert summary["endpoints"]["exact_control_novel_trajectory"]["count"] == counts.get("novel", 0)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *((name, "matrix --dtype bf16") for name in ("fixed_prefix", "bridge", "replication", "causes")),
        *((name, "fixed_prefix") for name in ("transplant", "carrier")),
    ],
)
def test_a_missing_source_is_refused_with_the_command_that_makes_one(study, tmp_path, name, command):
    source = "runs/matrix-bf16" if "matrix" in command else "runs/fixed_prefix-bf16-fp32"
    given = inputs(study, tasks=name in ("fixed_prefix", "bridge", "causes"))
    done = call(name, *(() if name in ("fixed_prefix", "causes") else BF16), *given, cwd=tmp_path)
    line = one_line(done, f"{source}: expected a run directory, found nothing")
    assert line.endswith(f"make it with: python -m experiments.{command}") and not (tmp_path / "runs").exists()


def respelled(tokenizer):
    """The same tokenizer in other bytes: the vocabulary's entries turned round."""
    tokenizer["model"]["vocab"] = dict(reversed(tokenizer["model"]["vocab"].items()))


def swapped(tokenizer):
    """Two ordinary ids stand for one another's text."""
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def swapped_delimiters(tokenizer):
    merge, answer = (next(t for t in tokenizer["added_tokens"] if t["content"] == n) for n in (OPEN[4], OPEN[5]))
    merge["content"], answer["content"] = answer["content"], merge["content"]


def edited(study, target, name, change):
    """The later checkpoint with one JSON file changed."""
    shutil.copytree(study / "later", target)
    value = read_json(target / name)
    change(value)
    (target / name).write_text(json.dumps(value))
    return target


def test_a_checkpoint_whose_tokenizer_says_the_same_in_other_bytes_replicates(study, tmp_path):
    other = edited(study, tmp_path / "other", "tokenizer.json", respelled)
    assert (other / "tokenizer.json").read_bytes() != (study / "later/tokenizer.json").read_bytes()
    common = (*BF16, "--limit", 1, "--threads", 1, "--quiet", "--batch-size", 1)
    done = call("replication", *common, "--checkpoint", other, "--out", tmp_path / "out", cwd=study)
    assert done.exit_code == 0, done.output
    assert "tokenizer.json: other bytes than in the run in runs/matrix-bf16" in done.stderr
    warnings = manifest_of(tmp_path / "out")["checkpoint_warnings"]
    assert any("vocabulary, merges, delimiters, eligible ids and contract are equal" in line for line in warnings)


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("tokenizer.json", swapped, "tokens.vocabulary_sha256"),
        ("tokenizer.json", swapped_delimiters, "tokens.delimiters"),
        ("contract.json", lambda contract: contract["caps"].update(merge=27), "caps.merge: expected 28, found 27"),
        ("contract.json", lambda contract: contract.update(ineligible_ids=[65]), "tokens.ordinary_ids_sha256"),
        ("contract.json", lambda contract: contract.update(role_offset=7), "role_offset: expected 8, found 7"),
    ],
)
def test_a_checkpoint_under_which_a_token_means_something_else_is_refused(study, tmp_path, name, change, part):
    other = edited(study, tmp_path / "other", name, change)
    done = call("replication", *BF16, "--checkpoint", other, "--out", tmp_path / "out", "--quiet", cwd=study)
    one_line(done, "expected tokens and contract as in the run in runs/matrix-bf16", part)
    assert not (tmp_path / "out").exists() and len(ledger(study / "runs/matrix-bf16")) == ROWS


def test_a_checkpoint_whose_context_is_too_short_is_refused(study, tmp_path):
    other = edited(study, tmp_path / "other", "config.json", lambda config: config.update(max_position_embeddings=90))
    done = call("replication", *BF16, "--checkpoint", other, "--out", tmp_path / "out", "--quiet", cwd=study)
    one_line(done, "its row may reach ", "expected at most the context 90")
