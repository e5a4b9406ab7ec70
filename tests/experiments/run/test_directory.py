"""Run directories: lock, manifest, order, setting an old run aside."""

import json
from pathlib import Path

import pytest

from experiments.run import directory
from experiments.run.directory import RunDirectory, read_finished, read_run
from experiments.run.ledger import row_key
from minimodel.errors import InputError
from tests.helpers import edit_json, refused

ROWS = [{"row": name, "gates": {"replica": True}, "passed": True} for name in ("a", "b")]
MANIFEST = {
    "experiment": "matrix",
    "schema": "s",
    "numeric": [{"dtype": "bf16", "threads": 2}],
    "row_order": ["a", "b"],
    "information": {"x": 1},
}


def test_a_second_writer_is_refused_until_the_first_lets_go(tmp_path):
    """hermes-agent 12684. Case 25."""
    first = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    with pytest.raises(InputError, match="lock"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    with pytest.raises(InputError, match="lock"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=True)
    first.close()
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()


def test_rows_there_are_kept_and_a_torn_one_is_reported(tmp_path):
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    run.append(ROWS[0], {"row": "a"})
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
        run.append(ROWS[0], {})
        run.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert all((tmp_path / name / "rows.jsonl").exists() for name in ("run", "run.1", "run.2"))


def test_a_directory_with_other_files_is_not_taken(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="found files without"):
        RunDirectory(tmp_path, MANIFEST, fresh=False)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"], "a refusal leaves nothing"


@pytest.mark.parametrize("document", [None, "{}", '{"schema": "of a browser extension"}', "not JSON"])
def test_fresh_sets_only_a_run_aside(tmp_path, document):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    if document is not None:
        (folder / "manifest.json").write_text(document)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with refused(str(folder), "expected"):
        RunDirectory(folder, MANIFEST, fresh=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_another_runs_refusal_leaves_no_lock_file(tmp_path):
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    (tmp_path / "run" / ".lock").unlink()  # as a copy without hidden files has none
    with refused("manifest.json", "found another's"):
        RunDirectory(tmp_path / "run", {**MANIFEST, "schema": "t"}, fresh=False)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["manifest.json"]


@pytest.mark.parametrize("spelling", [".", "./", "..", "../run/.", "sub/.."])
def test_the_working_directory_is_used_and_never_renamed(tmp_path, monkeypatch, spelling):
    home = tmp_path / "run"
    (home / "sub").mkdir(parents=True)
    inner = home / "sub" if spelling == ".." else home
    if spelling != ".." and spelling != "sub/..":
        (home / "sub").rmdir()
    monkeypatch.chdir(inner)
    if (home / "sub").exists():  # the directory is not empty: it is refused as any other, and not renamed
        with refused("found files without manifest.json"):
            RunDirectory(Path(spelling), MANIFEST, fresh=False)
        with refused("to set aside"):
            RunDirectory(Path(spelling), MANIFEST, fresh=True)
        (home / "sub" / "x").write_text("")
    else:
        RunDirectory(Path(spelling), MANIFEST, fresh=False).close()
        assert (home / "manifest.json").exists()
        with refused("the working directory or one above it"):
            RunDirectory(Path(spelling), MANIFEST, fresh=True)
        monkeypatch.chdir(tmp_path)
        RunDirectory(home, MANIFEST, fresh=True).close()  # the control: from outside it is set aside
    assert sorted(path.name for path in tmp_path.iterdir()) in (["run"], ["run", "run.1"])


def test_a_run_behind_a_link_is_set_aside_where_it_lies(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big")
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    RunDirectory(tmp_path / "run", MANIFEST, fresh=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "big.1", "run"]


def test_a_manifest_that_could_not_be_read_back_is_refused_before_the_first_row(tmp_path, monkeypatch):
    size = len(json.dumps(MANIFEST, indent=1)) + 1
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", size)
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", size - 1)
    with refused("manifest.json", f"at most {size - 1} bytes, found {size} for 2 rows"):
        RunDirectory(tmp_path / "other", MANIFEST, fresh=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("numeric", [[], [1], [{}], [{"dtype": None}]])
def test_a_manifest_without_a_numeric_contract_is_refused_by_every_reader(tmp_path, numeric):
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    read_run(tmp_path / "run")
    edit_json(tmp_path / "run" / "manifest.json", numeric=numeric)
    with refused("manifest.json: numeric", "at least one numeric contract"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["rows.jsonl", "timing.jsonl"])
def test_a_link_in_place_of_a_ledger_is_refused_and_its_target_untouched(tmp_path, name):
    RunDirectory(tmp_path / "run", MANIFEST, fresh=False).close()
    foreign = tmp_path / "foreign"
    foreign.write_text('{"half": "a line')
    (tmp_path / "run" / name).symlink_to(foreign)
    with refused(name, "found a link"):
        RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    assert foreign.read_text() == '{"half": "a line'


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
