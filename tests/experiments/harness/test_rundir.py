"""Run directories: lock, manifest, order, setting an old run aside."""

import json

import pytest

from experiments.harness.ledger import row_key
from experiments.harness.reader import read_finished, read_run
from experiments.harness.rundir import RunDirectory
from minimodel.errors import InputError
from tests.helpers import refused

ROWS = [{"row": name, "gates": {"replica": True}, "passed": True} for name in ("a", "b")]
MANIFEST = {
    "experiment": "matrix",
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
    run.append(ROWS[0], {})
    with pytest.raises(InputError, match="found 1 of 2 rows"):
        read_finished(tmp_path / "run")
    run.append(ROWS[1], {})
    written = {"rows": 2, "gates": {"replica": {"passed": 2, "of": 2}}, "passed": True}
    run.finish(written, "# report\n")
    run.close()
    read, summary = read_finished(tmp_path / "run")
    assert read.manifest == json.loads(json.dumps(MANIFEST)) and list(read.rows) == ["a", "b"] and summary == written
    with pytest.raises(InputError, match="found nothing"):
        read_finished(tmp_path / "none")


@pytest.mark.parametrize("wrong", [{"rows": 3}, {"gates": {"replica": {"passed": 1, "of": 2}}}])
def test_a_summary_that_the_ledger_contradicts_is_refused(tmp_path, wrong):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    for row in ROWS:
        run.append(row, {})
    run.finish({"rows": 2, "gates": {"replica": {"passed": 2, "of": 2}}, "passed": True, **wrong}, "")
    run.close()
    with refused("summary.json", next(iter(wrong)), "from rows.jsonl"):
        read_finished(tmp_path / "run")


def test_two_rows_of_one_identity_are_refused_when_written_and_when_read(tmp_path):
    with refused("row_order", "each row once", "bf16/a"):
        RunDirectory(tmp_path / "run", {**MANIFEST, "row_order": ["bf16/a", "fp32/a", "bf16/a"]}, fresh=False)
    cells = [
        {"row": "a", "cell": cell, "gates": {}, "passed": True} for cell in ("bf16/eager/plain", "bf16/eager/tiled")
    ]
    manifest = {**MANIFEST, "row_order": [row_key(row) for row in cells]}
    run = RunDirectory(tmp_path / "cells", manifest, fresh=False)
    run.append(cells[0], {})
    with pytest.raises(AssertionError, match="the manifest's order"):
        run.append(cells[0], {})
    run.append(cells[1], {})
    run.close()
    assert list(read_run(tmp_path / "cells").rows) == manifest["row_order"]
    # a ledger that holds the first row twice, each line intact
    line = (tmp_path / "cells/rows.jsonl").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "cells/rows.jsonl").write_bytes(2 * line)
    with refused("rows.jsonl", "each row once", "bf16/eager/plain/a"):
        read_run(tmp_path / "cells")
    with refused("rows.jsonl", "each row once"):
        RunDirectory(tmp_path / "cells", manifest, fresh=False)


def test_rows_in_another_order_than_the_manifests_are_refused(tmp_path):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    for row in ROWS:
        run.append(row, {})
    run.close()
    path = tmp_path / "run/rows.jsonl"
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    with refused("rows.jsonl line 1", "row 'a'", "'b'"):
        read_run(tmp_path / "run")
    with refused("rows.jsonl line 1", "row 'a'", "'b'"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
