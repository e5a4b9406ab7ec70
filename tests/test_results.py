"""The committed claims of measured runs: consistent in themselves, in the README's table, and, where the runs are at
hand, with their summaries and ledgers."""

import json
import os
import re
from pathlib import Path

import pytest

from stats.intervals import Z_MATRIX, Z_TRANSPLANT, wilson
from tests.results import claims_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results.json"
RUNS = "STAGE_REPLAY_RUNS"  # a folder that holds the runs, under the names of results.json
CLAIMS = json.loads(RESULTS.read_text())


def rates(value, at=""):
    """(path, record) of every {count, n, ...} in the claims."""
    if not isinstance(value, dict):
        return []
    here = [(at, value)] if {"count", "n", "wilson_95"} <= set(value) else []
    return here + [pair for key, child in value.items() for pair in rates(child, f"{at}.{key}" if at else key)]


@pytest.mark.parametrize("record", [pytest.param(record, id=at) for at, record in rates(CLAIMS)])
def test_every_rate_and_interval_follows_from_its_counts(record):
    assert follows(record)


def follows(record):
    """Whether rate and interval are those of count and n, at the z of the matrices or of the transplants."""
    return record in [wilson(record["count"], record["n"], z).as_dict() for z in (Z_MATRIX, Z_TRANSPLANT)]


def test_a_changed_count_would_be_noticed():
    _, record = rates(CLAIMS)[0]
    assert not follows({**record, "count": record["count"] + 1})


def test_every_run_passed_its_gates():
    assert CLAIMS and all(claims["passed"] for claims in CLAIMS.values())


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_the_readme_states_the_counts_of_the_claims(name):
    """Suffixes that differ, or donors that were followed, as count/n in the section on results."""
    text = re.search(r"^## Results\n(.*?)^## ", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert text is not None
    claims = CLAIMS[name]
    block = next((claims[dtype] for dtype in claims["dtypes"] if dtype in claims), claims)
    rate = block.get("bidirectional_donor_recovery") or block["suffix_disagreement"]
    if block.get("experiment") == "bridge":  # its count is of equal rows
        rate = {"count": rate["n"] - rate["count"], "n": rate["n"]}
    assert f"{rate['count']}/{rate['n']}" in text.group(1)


@pytest.mark.skipif(RUNS not in os.environ, reason=f"{RUNS} names no folder with the measured runs")
@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_the_claims_are_those_of_the_runs(name):
    assert claims_of(Path(os.environ[RUNS], name)) == CLAIMS[name]


def test_claims_follow_a_run_and_its_ledger(tmp_path):
    """The same function on a run made up of three files: one changed byte of the ledger changes its digest."""
    record = {"count": 1, "n": 2, "rate": 0.5, "wilson_95": [0.1, 0.9]}
    numeric = [{"dtype": "bf16", "attention": "repeat_kv", "linear": "plain"}]
    manifest = {"experiment": "matrix", "numeric": numeric, "checkpoint": {}, "tasks_sha256": "a", "code_sha256": "b"}
    summary = {"rows": 2, "passed": True, "suffix_disagreement": record}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    before = claims_of(tmp_path)
    assert before["suffix_disagreement"] == record and before["kernels"] == ["repeat_kv/plain"]
    (tmp_path / "rows.jsonl").write_text("{ }\n")
    assert {key for key, value in claims_of(tmp_path).items() if before[key] != value} == {"rows_sha256"}
