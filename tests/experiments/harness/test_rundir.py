"""Run directories: lock, manifest, order, setting an old run aside."""

import json

import pytest

from experiments.harness.rundir import RunDirectory, differing_fields, open_finished
from minimodel.errors import InputError

MANIFEST = {
    "schema": "s",
    "numeric": [{"dtype": "bf16", "threads": 2}],
    "row_order": ["a", "b"],
    "information": {"x": 1},
}


def test_a_second_writer_is_refused_until_the_first_lets_go(tmp_path):
    """hermes-agent 12684."""
    first = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    with pytest.raises(InputError, match="lock"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    with pytest.raises(InputError, match="lock"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=True)
    first.close()
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()


def test_rows_there_are_kept_and_a_torn_one_is_reported(tmp_path):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    run.append({"row": "a"}, {"row": "a"})
    run.close()
    ledger = tmp_path / "run" / "rows.jsonl"
    kept = ledger.read_bytes()
    ledger.write_bytes(kept + b'{"row":"b"')
    again = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    assert [row["row"] for row in again.rows] == ["a"]
    assert again.dropped == 10
    assert ledger.read_bytes() == kept
    again.close()


def test_another_manifest_is_refused_with_the_fields_that_differ(tmp_path):
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    other = {**MANIFEST, "numeric": [{"dtype": "bf16", "threads": 1}]}
    with pytest.raises(InputError, match=r"numeric\[0\]\.threads: expected 1, found 2"):
        RunDirectory(tmp_path / "run", other, fresh=False)
    # paths and commit are information: they do not decide a bit
    RunDirectory(tmp_path / "run", {**MANIFEST, "information": {"x": 2}}, fresh=False).close()


def test_rows_out_of_order_are_refused(tmp_path):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    run.append({"row": "b"}, {})
    run.close()
    with pytest.raises(InputError, match="order"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=False)


def test_fresh_sets_the_old_run_aside_and_deletes_nothing(tmp_path):
    for _ in range(3):
        run = RunDirectory(tmp_path / "run", MANIFEST, fresh=True)
        run.append({"row": "a"}, {})
        run.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert all((tmp_path / name / "rows.jsonl").exists() for name in ("run", "run.1", "run.2"))


def test_a_directory_with_other_files_is_not_taken(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="found files without"):
        RunDirectory(tmp_path, MANIFEST, fresh=False)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_only_a_finished_run_can_be_read(tmp_path):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    run.append({"row": "a"}, {})
    with pytest.raises(InputError, match="found 1 of 2 rows"):
        open_finished(tmp_path / "run")
    run.append({"row": "b"}, {})
    run.finish({"passed": True}, "# report\n")
    run.close()
    manifest, rows, summary = open_finished(tmp_path / "run")
    assert manifest == json.loads(json.dumps(MANIFEST)) and len(rows) == 2 and summary == {"passed": True}
    with pytest.raises(InputError, match="found nothing"):
        open_finished(tmp_path / "none")


def test_differing_fields_name_every_leaf():
    assert differing_fields({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c: expected 2, found 3",
        "d: expected null, found 4",
    ]
    assert differing_fields({"a": 1}, {"a": True}) == ["a: expected 1, found true"]


def test_a_longer_run_is_told_from_a_trial_of_its_first_rows():
    trial = {"row_order": [f"demo-{i:03}" for i in range(4)]}
    whole = {"row_order": [f"demo-{i:03}" for i in range(200)]}
    assert differing_fields(whole, trial) == ["row_order: expected 200 entries, found 4"]
    other = {"row_order": [*trial["row_order"][:3], "demo-007"]}
    [line] = differing_fields(trial, other)
    assert line == 'row_order: expected 4 entries, found 4; entry 3: expected "demo-003", found "demo-007"'
