"""One small study for the experiments' tests, and the runs that the report is tested on: each is made once."""

import pytest

from tests.experiments.runs import call, run, write_study


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """primary/, later/, stock/, tasks.jsonl, runs/matrix-bf16, runs/fixed_prefix-bf16-fp32. No test may write here."""
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def every_run(study, tmp_path_factory):
    """One finished run of every experiment, the matrix in both precisions. No test may write into them."""
    root = tmp_path_factory.mktemp("every")
    bf16, few = ["--dtype", "bf16"], ["--dtype", "bf16", "--limit", 2]
    made = {name: root / name for name in ("matrix-fp32", "bridge", "transplant", "replication", "batch_control")}
    run(study, "matrix", made["matrix-fp32"], "--dtype", "fp32")
    run(study, "bridge", made["bridge"], *bf16)
    run(study, "transplant", made["transplant"], *bf16, tasks=False)
    run(study, "replication", made["replication"], *bf16, tasks=False, checkpoint="later")
    run(study, "batch_control", made["batch_control"], *few)
    run(study, "stock_control", root / "stock_control", *few, checkpoint="stock")
    made["stock_control"] = root / "stock_control"
    # two cells of one precision, and a second precision, so that one id stands in several rows
    cells = [part for name in ("repeat_kv/plain", "eager/plain") for part in ("--cell", name)]
    run(study, "causes", root / "causes", "--rows", 2, *cells, "--dtype", "bf16", "--dtype", "fp32")
    run(study, "carrier", root / "carrier", "--dtype", "bf16", "--rows", 2, tasks=False)
    made |= {"causes": root / "causes", "carrier": root / "carrier", "audit": root / "audit"}
    made |= {"matrix": study / "runs/matrix-bf16", "fixed_prefix": study / "runs/fixed_prefix-bf16-fp32"}
    done = call("audit", made["matrix"], made["fixed_prefix"], "--out", made["audit"], cwd=study)
    assert done.exit_code == 0, done.output
    return made


@pytest.fixture(scope="session")
def reported(study, tmp_path_factory):
    """The study's two runs, a transplant and a small replication."""
    root = tmp_path_factory.mktemp("report")
    run(study, "transplant", root / "transplant-bf16", "--dtype", "bf16", "--limit", 3, tasks=False)
    more = ["--dtype", "bf16", "--limit", 2]
    run(study, "replication", root / "replication-bf16", *more, tasks=False, checkpoint="later")
    known = [study / "runs/matrix-bf16", study / "runs/fixed_prefix-bf16-fp32"]
    return [*known, root / "transplant-bf16", root / "replication-bf16"]
