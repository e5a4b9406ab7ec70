"""Default, transplant and invariant runs side by side: the rows that stand there, and where their numbers come from."""

import statistics

import pytest

from experiments.report.runs import read_runs
from experiments.report.sections import side_by_side
from experiments.report.values import rate
from tests.experiments.runs import run

COLUMNS = ["what", "run", "dtype", "cache bit-exact", "suffix", "chunk sizes exact", "cost per row"]


@pytest.fixture(scope="module")
def paths(study, tmp_path_factory):
    root = tmp_path_factory.mktemp("side")
    run(study, "matrix", root / "invariant", "--dtype", "bf16", "--kernels", "invariant")
    run(study, "causes", root / "causes", "--dtype", "bf16", "--rows", 2, "--cell", "repeat_kv/plain")
    run(study, "causes", root / "both", "--dtype", "bf16", "--rows", 2, "--cell", "repeat_kv/plain", "--cell",
        "blocked/tiled")  # fmt: skip
    run(study, "transplant", root / "transplant", "--dtype", "bf16", tasks=False)
    return {"matrix": study / "runs" / "matrix-bf16", **{path.name: path for path in root.iterdir()}}


def lines(paths, *names):
    section = side_by_side(read_runs([paths[name] for name in names]))
    [_, found] = section.blocks
    assert list(found.header) == COLUMNS
    return [dict(zip(COLUMNS, row)) for row in found.rows]


def test_default_first_then_transplants_then_invariant_with_its_cost(paths):
    found = lines(paths, "matrix", "both", "transplant", "invariant")
    assert [line["what"].split(",")[0] for line in found] == [
        "default",
        "default",
        "whole cache transplanted",
        "invariant",
        "invariant",
    ]
    assert [line["run"].text for line in found] == ["matrix-bf16", "both", "transplant", "both", "invariant"]
    both, plain, other = (read_runs([paths[name]])[0] for name in ("both", "matrix", "invariant"))
    assert found[0]["suffix"] == f"differs {rate(plain.summary['suffix_disagreement'])}"
    assert found[0]["cache bit-exact"] != found[4]["cache bit-exact"] == f"{len(other.rows)}/{len(other.rows)}"
    sizes = len(both.summary["chunks"]["bf16/blocked/tiled"])
    assert found[3]["chunk sizes exact"] == f"{sizes} of {sizes}"
    assert found[1]["chunk sizes exact"] == f"1 of {sizes}"  # one token per call is the incremental construction
    seconds = [{line["row"]: line["seconds"] for line in one.timing} for one in (other, plain)]
    ratio = statistics.median(seconds[0][row] / seconds[1][row] for row in seconds[0])
    assert found[4]["cost per row"] == f"{ratio:.2f} ({len(other.rows)} rows)"
    recovery = read_runs([paths["transplant"]])[0].summary["endpoints"]["bidirectional_donor_recovery"]
    assert found[2]["suffix"] == f"follows its donor both ways {rate(recovery)}"


def test_without_one_of_the_two_there_is_nothing_to_set_side_by_side(paths):
    assert side_by_side(read_runs([paths["matrix"], paths["causes"], paths["transplant"]])) is None
    assert side_by_side(read_runs([paths["invariant"]])) is None


def test_cost_needs_a_default_of_the_same_experiment(paths):
    assert [line["cost per row"] for line in lines(paths, "causes", "invariant")] == ["1", "not measured"]
