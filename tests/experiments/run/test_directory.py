"""Run directories: lock, manifest, order, setting an old run aside, reading a run back."""

import json
from pathlib import Path

import pytest

from experiments.run import directory
from experiments.run.directory import RunDirectory, partial_ledger, read_finished, read_run
from experiments.run.ledger import row_key
from tests.helpers import edit_json, refused

ROWS = [{"row": name, "gates": {"replica": True}, "passed": True} for name in ("a", "b")]
SUMMARY = {"rows": 2, "gates": {"replica": {"passed": 2, "of": 2}}, "passed": True}
MANIFEST = {
    "experiment": "matrix",
    "schema": "s",
    "numeric": [{"dtype": "bf16", "threads": 2}],
    "row_order": ["a", "b"],
    "information": {"x": 1},
}


def opened(path, fresh=False, rows=(), **changed):
    """A run directory that was opened, holds the rows, and is closed again."""
    run = RunDirectory(path, {**MANIFEST, **changed}, fresh)
    for row in rows:
        run.append(row, {"row": row["row"]})
    run.close()
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_row_done_before_an_earlier_one_waits_in_a_partial_ledger(tmp_path):
    indexed = [{**row, "index": index} for index, row in enumerate(ROWS)]
    for row in reversed(indexed):
        run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
        run.keep(row["index"], row, {"row": row["row"]})
        assert (run.take() is None) == (row["row"] == "b"), "b waits for a"
        run.close()
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    assert run.length == 1 and list(run.waiting) == [1] and run.take()["row"] == "b"
    run.finish(SUMMARY, "")
    run.close()
    assert list(read_run(tmp_path / "run").rows) == ["a", "b"] and "partial" not in names(tmp_path / "run")
    timing = (tmp_path / "run/timing.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in timing] == ["a", "b"]


@pytest.mark.parametrize(("passed", "same"), [(True, True), (False, False)])
def test_a_partial_row_must_be_the_one_that_the_ledger_holds(tmp_path, passed, same):
    row = {**ROWS[0], "index": 0}
    path = opened(tmp_path / "run", rows=[row])
    with partial_ledger(path, 1) as keep:
        keep(0, {**row, "passed": passed}, {"row": "a"})
    if same:
        assert opened(path) == path
    else:
        with refused("rows-1.jsonl line 1: expected row a as elsewhere in this run, found other bytes"):
            opened(path)


def test_another_manifest_is_refused_with_the_fields_that_differ(tmp_path):
    path = opened(tmp_path / "run")
    with refused("numeric[0].threads: expected 1, found 2"):
        opened(path, numeric=[{"dtype": "bf16", "threads": 1}])
    opened(path, information={"x": 2})  # paths and commit are information: they do not decide a bit
    (path / ".lock").unlink()  # as a copy without hidden files has none
    with refused("manifest.json", "found another's"):
        opened(path, schema="t")
    assert names(path) == ["manifest.json"], "a refusal leaves no lock file"


def test_fresh_sets_the_old_run_aside_and_deletes_nothing(tmp_path):
    (tmp_path / "run").mkdir()  # an empty directory stays where it is
    for _ in range(3):
        opened(tmp_path / "run", fresh=True, rows=ROWS[:1])
    assert names(tmp_path) == ["run", "run.1", "run.2"]
    assert all((tmp_path / name / "rows.jsonl").exists() for name in names(tmp_path))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("document", [None, "{}", '{"schema": "of a browser extension"}', "not JSON"])
def test_a_directory_of_anything_else_is_not_taken_and_not_set_aside(tmp_path, document, fresh):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    if document is not None:
        (folder / "manifest.json").write_text(document)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with refused(str(folder), "expected"):
        opened(folder, fresh)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before, "a refusal leaves nothing"
    assert names(tmp_path) == ["thesis"]


@pytest.mark.parametrize("spelling", [".", "./", "../run/."])
def test_the_working_directory_is_used_and_never_renamed(tmp_path, monkeypatch, spelling):
    home = tmp_path / "run"
    home.mkdir()
    monkeypatch.chdir(home)
    opened(Path(spelling))
    assert (home / "manifest.json").exists()
    with refused("the working directory or one above it"):
        opened(Path(spelling), fresh=True)
    monkeypatch.chdir(tmp_path)
    opened(home, fresh=True)  # the control: from outside it is set aside
    assert names(tmp_path) == ["run", "run.1"]


@pytest.mark.parametrize("spelling", ["..", "sub/.."])
def test_a_directory_above_the_working_directory_is_never_renamed(tmp_path, monkeypatch, spelling):
    (tmp_path / "run/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run/sub" if spelling == ".." else tmp_path / "run")
    for fresh, message in ((False, "found files without manifest.json"), (True, "to set aside")):
        with refused(message):
            opened(Path(spelling), fresh)
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["source", "left", "right", "tasks", "checkpoint"])
def test_a_run_that_the_command_reads_is_not_set_aside(tmp_path, name):
    path = opened(tmp_path / "run", rows=ROWS)
    for given in (path, path / "rows.jsonl"):
        with refused("to set aside", f"{name} {given}", "choose --out"):
            opened(path, fresh=True, information={name: str(given)})
    assert names(tmp_path) == ["run"]
    opened(path, fresh=True, information={name: str(tmp_path / "run.x")})  # the control: one beside it
    assert names(tmp_path) == ["run", "run.1"]


def test_a_run_behind_a_link_is_set_aside_where_it_lies(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big")
    for fresh in (False, True):
        opened(tmp_path / "run", fresh)
    assert names(tmp_path) == ["big", "big.1", "run"]


def test_a_manifest_that_could_not_be_read_back_is_refused_before_the_first_row(tmp_path, monkeypatch):
    size = len(json.dumps(MANIFEST, indent=1)) + 1
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", size)
    opened(tmp_path / "run")
    monkeypatch.setattr(directory, "MAX_JSON_BYTES", size - 1)
    with refused("manifest.json", f"at most {size - 1} bytes, found {size} for 2 rows"):
        opened(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        *(("numeric", value, "at least one numeric contract") for value in ([], [{}], [{"dtype": None}])),
        *(("numeric", value, part) for value, part in (({}, ": expected list"), ([1], "[0]: expected dict"))),
        ("experiment", None, "experiment: expected str, found None"),
        *(("row_order", value, part) for value, part in (("ab", ": expected list"), ([1], "[0]: expected str"))),
        ("row_order", ..., "expected the field 'row_order', found none"),
    ],
)
def test_a_manifest_that_lacks_what_readers_use_is_refused_by_every_reader(tmp_path, key, value, part):
    path = opened(tmp_path / "run")
    read_run(path)
    edit_json(path / "manifest.json", **{key: value})
    with refused("manifest.json: ", key, part):
        read_run(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "timing.jsonl"])
def test_a_link_in_place_of_a_ledger_is_refused_and_its_target_untouched(tmp_path, name):
    path, foreign = opened(tmp_path / "run"), tmp_path / "foreign"
    foreign.write_text('{"half": "a line')
    (path / name).symlink_to(foreign)
    with refused(name, "found a link"):
        opened(path)
    assert foreign.read_text() == '{"half": "a line'


def test_only_a_finished_run_can_be_read(tmp_path):
    with refused("found 1 of 2 rows"):
        read_finished(opened(tmp_path / "run", rows=ROWS[:1]))
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    run.append(ROWS[1], {})
    run.finish(SUMMARY, "# report\n")
    run.close()
    read, summary = read_finished(tmp_path / "run")
    assert read.manifest == MANIFEST and list(read.rows) == ["a", "b"] and summary == SUMMARY
    with refused("found nothing"):
        read_finished(tmp_path / "none")
    for wrong in ({"rows": 3}, {"gates": {"replica": {"passed": 1, "of": 2}}}):
        edit_json(tmp_path / "run/summary.json", **{**SUMMARY, **wrong})
        with refused("summary.json", next(iter(wrong)), "from rows.jsonl"):
            read_finished(tmp_path / "run")


def test_a_failed_row_is_not_read_as_passed(tmp_path):
    failed = {**ROWS[1], "gates": {"replica": False}, "passed": False}
    run = RunDirectory(tmp_path / "run", MANIFEST, fresh=False)
    for row in (ROWS[0], failed):
        run.append(row, {})
    gates = {"replica": {"passed": 1, "of": 2}}
    for passed in (False, True):
        run.finish({**SUMMARY, "gates": gates, "passed": passed}, "")
        if passed:
            with refused("summary.json: passed: expected False (from rows.jsonl)"):
                read_run(tmp_path / "run")
        else:
            assert read_run(tmp_path / "run").summary["passed"] is False
    run.close()


def test_a_row_has_exactly_one_numeric_contract(tmp_path):
    rows, order = [{**ROWS[0], "dtype": "bf16"}], ["bf16/a"]
    for count, numeric in enumerate(([{"dtype": "fp32"}], MANIFEST["numeric"], MANIFEST["numeric"] * 2)):
        run = read_run(opened(tmp_path / str(count), rows=rows, numeric=numeric, row_order=order))
        if count == 1:
            assert run.numeric_of("bf16/a") == MANIFEST["numeric"][0]
        else:
            with refused("numeric: expected one contract of row bf16/a", f"found '{count} of them'"):
                run.numeric_of("bf16/a")


def test_two_rows_of_one_identity_are_refused_when_written_and_when_read(tmp_path):
    with refused("row_order", "each row once", "bf16/a"):
        opened(tmp_path / "run", row_order=["bf16/a", "fp32/a", "bf16/a"])
    cells = [{**ROWS[0], "cell": cell} for cell in ("bf16/eager/plain", "bf16/eager/tiled")]
    order = [row_key(row) for row in cells]
    run = RunDirectory(tmp_path / "cells", {**MANIFEST, "row_order": order}, fresh=False)
    run.append(cells[0], {})
    with pytest.raises(AssertionError, match="the manifest's order"):
        run.append(cells[0], {})
    run.append(cells[1], {})
    run.close()
    assert list(read_run(tmp_path / "cells").rows) == order
    # a ledger that holds the first row twice, each line intact
    line = (tmp_path / "cells/rows.jsonl").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "cells/rows.jsonl").write_bytes(2 * line)
    for read in (read_run, lambda path: opened(path, row_order=order)):
        with refused("rows.jsonl", "each row once", "bf16/eager/plain/a"):
            read(tmp_path / "cells")


def test_rows_in_another_order_than_the_manifests_are_refused(tmp_path):
    path = opened(tmp_path / "run", rows=ROWS) / "rows.jsonl"
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    for read in (read_run, opened):
        with refused("rows.jsonl line 1", "row 'a'", "'b'"):
            read(tmp_path / "run")
