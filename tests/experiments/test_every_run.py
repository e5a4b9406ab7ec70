"""A run of every experiment: its arms and gates; crosscheck and audit on two: equal, one leaf changed, one row less."""

import json
from dataclasses import replace

import pytest

from experiments.bridge import Bridge
from experiments.carrier import Carrier
from experiments.causes.__main__ import Causes
from experiments.fixed_prefix import FixedPrefix
from experiments.run import control
from experiments.run.designs import RetainedLive, SixArms
from experiments.run.directory import read_finished, read_run
from experiments.run.ledger import leaves, row_key
from tests.experiments.runs import altered, call, change_at
from tests.helpers import refused

KINDS = {
    "matrix": RetainedLive,
    "fixed_prefix": FixedPrefix,
    "bridge": Bridge,
    "transplant": SixArms,
    "replication": SixArms,
    "batch_control": control.Control,
    "stock_control": control.Control,
    "causes": Causes,
    "carrier": Carrier,
}
EXPERIMENTS = (*KINDS, "audit")


@pytest.mark.parametrize(("experiment", "kind"), KINDS.items())
def test_a_row_has_every_arm_and_gate_in_the_experiments_order(every_run, experiment, kind):
    run, summary = read_finished(every_run[experiment])
    arms = {control.Control: control.ARMS, Carrier: ("incremental", "prefill")}
    assert list(run.rows) == run.manifest["row_order"] and summary["passed"] and summary["no_result"] is None
    for row in run.rows.values():
        assert tuple(row["arms"]) == tuple(arms.get(kind) or kind.arms)
        assert list(row["gates"]) == kind.gates() and row["passed"] and all(row["gates"].values())
        if kind in (SixArms, Bridge, Carrier):
            names = {key for part in ("arms", "comparisons") for one in row[part].values() for key in one}
            assert not names & {"correct", "scored", "answer_equal", "correct_equal"}, "their arms are not scored"


def verdicts(left, right, cwd):
    """The exit codes and outputs of both commands."""
    compared = call("crosscheck", left, right, "--no-rerun"), call("audit", left, right, cwd=cwd)
    return [done.exit_code for done in compared], [done.output for done in compared]


def nudged(value):
    """The least change that JSON shows."""
    return not value if isinstance(value, bool) else value + ("x" if isinstance(value, str) else 1.0)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_equal_runs_are_equal(every_run, experiment, tmp_path):
    copy = altered(every_run[experiment], tmp_path / "copy", lambda rows: None)
    codes, outputs = verdicts(every_run[experiment], copy, tmp_path)
    assert codes == [0, 0], outputs
    count = len(read_run(copy).rows)
    assert f"{count} of {count} common rows equal" in outputs[0]
    assert f"{count}/{count} rows agree; the runs agree" in outputs[1]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_changed_leaf_is_named_in_its_own_row(every_run, experiment, place, tmp_path):
    """The last leaf under the row's largest part."""
    found = []

    def change(rows):
        row = rows[place]
        part = max((key for key in row if isinstance(row[key], dict)), key=lambda key: len(json.dumps(row[key])))
        path = [name for name, value in leaves(row[part]).items() if isinstance(value, bool | str | float)][-1]
        found.extend((row_key(row), f"{part}.{path}"))
        change_at(row[part], path.replace("[", ".").replace("]", ""), nudged)

    copy = altered(every_run[experiment], tmp_path / "copy", change)
    codes, outputs = verdicts(every_run[experiment], copy, tmp_path)
    assert codes == [3, 3], outputs
    row, path = found
    assert f"row {row}: differs in 1 fields" in outputs[0] and path in outputs[0]
    (disagreeing,) = [line for line in outputs[1].splitlines() if line.startswith("rows that disagree: ")]
    assert disagreeing.split(": ")[1].endswith(row) and len(disagreeing.split(": ")[1].split()) == 1


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_missing_row_is_a_difference_in_either_run(every_run, experiment, tmp_path):
    missing, run = [], every_run[experiment]
    copy = altered(run, tmp_path / "copy", lambda rows: missing.append(row_key(rows.pop())))
    for pair, letter, side in (((run, copy), "A", "left"), ((copy, run), "B", "right")):
        codes, outputs = verdicts(*pair, tmp_path)
        assert codes == [3, 3], outputs
        assert f"1 rows only in {letter}: {missing[0]}" in outputs[0]
        (alone,) = [line for line in outputs[1].splitlines() if f"rows of the {side} run alone: 1, " in line]
        assert alone.endswith(missing[0])


def test_a_row_has_the_contract_of_its_own_cell(every_run):
    """Every cell row names its kernels, every precision row its dtype; a run of one contract has that one."""
    causes = read_run(every_run["causes"])
    for key, row in causes.rows.items():
        numeric = causes.numeric_of(key)
        assert row["cell"] == f"{numeric['dtype']}/{numeric['attention']}/{numeric['linear']}"
    assert len({json.dumps(causes.numeric_of(key)) for key in causes.rows}) == len(causes.manifest["numeric"]) == 4
    fixed = read_run(every_run["fixed_prefix"])
    assert all(fixed.numeric_of(key)["dtype"] == row["dtype"] for key, row in fixed.rows.items())
    one = replace(fixed, manifest={**fixed.manifest, "numeric": fixed.manifest["numeric"][:1]})
    with refused("manifest.json: numeric: expected one contract of row fp32/t000, found '0 of them'"):
        one.numeric_of("fp32/t000")
    bridge = read_run(every_run["bridge"])
    assert all(bridge.numeric_of(key) == bridge.manifest["numeric"][0] for key in bridge.rows)
