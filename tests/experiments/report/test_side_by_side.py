"""Default, transplant and invariant runs side by side: the rows that stand there, and where their numbers come from."""

import statistics

import pytest

from experiments.report.runs import read_runs
from experiments.report.sections import side_by_side
from experiments.report.values import rate
from tests.experiments.runs import run

COLUMNS = ["what", "run", "dtype", "cache bit-exact", "suffix", "chunk sizes exact", "cost per row"]


@pytest.fixture(scope="module")
def runs(study, every_run, tmp_path_factory):
    """A default and an invariant matrix, a crossing of both kernels, and a transplant."""
    root, bf16 = tmp_path_factory.mktemp("side"), ("--dtype", "bf16")
    run(study, "matrix", root / "invariant", *bf16, "--kernels", "invariant")
    run(study, "causes", root / "both", *bf16, "--rows", 2, "--cell", "repeat_kv/plain", "--cell", "blocked/tiled")
    return read_runs([every_run["matrix"], root / "both", every_run["transplant"], root / "invariant"])


def lines(*runs):
    [_, found] = side_by_side(runs).blocks
    assert list(found.header) == COLUMNS
    return [dict(zip(COLUMNS, row)) for row in found.rows]


def test_default_first_then_transplants_then_invariant_with_its_cost(runs):
    found, (plain, both, transplant, other) = lines(*runs), runs
    assert [(line["what"].split(",")[0], line["run"].text) for line in found] == [
        ("default", "matrix-bf16"),
        ("default", "both"),
        ("whole cache transplanted", "transplant-bf16"),
        ("invariant", "both"),
        ("invariant", "invariant"),
    ]
    assert found[0]["suffix"] == f"differs {rate(plain.summary['suffix_disagreement'])}"
    assert found[0]["cache bit-exact"] != found[4]["cache bit-exact"] == f"{len(other.rows)}/{len(other.rows)}"
    sizes = len(both.summary["chunks"]["bf16/blocked/tiled"])
    assert found[3]["chunk sizes exact"] == f"{sizes} of {sizes}"
    assert found[1]["chunk sizes exact"] == f"1 of {sizes}"  # one token per call is the incremental construction
    seconds = [{line["row"]: line["seconds"] for line in one.timing} for one in (other, plain)]
    ratio = statistics.median(seconds[0][row] / seconds[1][row] for row in seconds[0])
    assert found[4]["cost per row"] == f"{ratio:.2f} ({len(other.rows)} rows)"
    recovery = transplant.summary["endpoints"]["bidirectional_donor_recovery"]
    assert found[2]["suffix"] == f"follows its donor both ways {rate(recovery)}"


def test_without_one_of_the_two_there_is_nothing_to_set_side_by_side(runs):
    plain, _, transplant, other = runs
    assert side_by_side([plain, transplant]) is None and side_by_side([other]) is None


def test_cost_needs_a_default_of_the_same_experiment(runs):
    default, ours, matrix = lines(runs[1], runs[3])
    assert default["cost per row"] == "1" and ours["cost per row"].endswith(" (2 rows)")
    assert matrix["cost per row"] == "not measured"
