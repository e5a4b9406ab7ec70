"""Reporting runs as they are: failures are loud, contradictions refused, the unknown reported whole."""

import json
import shutil

import pytest

from experiments.matrix import matrix_summary
from tests.experiments.report.page import HOSTILE, Page
from tests.experiments.runs import call, ledger, one_line, rewrite, summary_of


def altered(path, to, change):
    """A copy of a matrix run with changed rows, its summary made anew."""
    shutil.copytree(path, to)
    rows = ledger(to)
    change(rows)
    rewrite(to, rows)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["row_order"] = [row["row"] for row in rows]
    (to / "manifest.json").write_text(json.dumps(manifest))
    (to / "summary.json").write_text(json.dumps(matrix_summary("bf16", rows)))
    return to


def test_a_failed_gate_is_loud_and_its_row_id_harmless(reported, tmp_path):
    def fail(rows):
        rows[0]["row"] = HOSTILE
        rows[0]["gates"]["replica_live"] = rows[0]["passed"] = False

    bad = altered(reported[0], tmp_path / "matrix-bad", fail)
    done = call("report", bad, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 3 and "FAILED: matrix-bad: row" in done.output
    page = Page((tmp_path / "out/report.html").read_text())
    assert "img" not in {tag for tag, _ in page.tags} and [tag for tag, _ in page.tags].count("script") == 1
    assert ("p", {"class": "alert"}) in page.tags and ("p", {"class": "verdict"}) not in page.tags
    gates = {row[0]: row[1] for row in page.tables["Integrity gates, rows passed"]}
    n = len(ledger(bad))
    assert gates["replica live"] == f"{n - 1}/{n} FAILED" and gates["argmax"] == f"{n}/{n}"
    assert "**FAILED:** matrix-bad: row" in (tmp_path / "out/report.md").read_text()


def test_an_unfinished_run_gives_no_numbers(reported, tmp_path):
    shutil.copytree(reported[0], tmp_path / "matrix-cut")
    lines = (tmp_path / "matrix-cut/rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "matrix-cut/rows.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    done = call("report", tmp_path / "matrix-cut", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 3 and f"unfinished, 2 of {len(lines)} rows" in done.output
    page = Page((tmp_path / "out/report.html").read_text())
    assert "Prefill against live" not in page.tables


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (lambda run: (run / "manifest.json").unlink(), ("expected a run directory", "no manifest")),
        (lambda run: edit(run, passed=False, gates={}), ("summary.json: gates",)),
        (lambda run: edit(run, rows=1), ("summary.json: rows",)),
        (lambda run: damage(run), ("line 1", "damage")),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(reported, tmp_path, break_it, parts):
    shutil.copytree(reported[0], tmp_path / "run")
    break_it(tmp_path / "run")
    message = one_line(call("report", tmp_path / "run", "--out", tmp_path / "out", cwd=tmp_path))
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


def edit(run, **changes):
    (run / "summary.json").write_text(json.dumps({**summary_of(run), **changes}))


def damage(run):
    rows = (run / "rows.jsonl").read_text()
    (run / "rows.jsonl").write_text(rows.replace('"index":0', '"index":7', 1))


def test_the_same_run_twice_and_an_empty_folder_are_refused(reported, tmp_path):
    assert "each run once" in one_line(call("report", reported[0], reported[0], cwd=tmp_path))
    assert "python -m experiments.study" in one_line(call("report", cwd=tmp_path))


def test_an_experiment_never_heard_of_is_reported_whole(reported, tmp_path):
    bad = altered(reported[0], tmp_path / "novel", lambda rows: None)
    manifest = json.loads((bad / "manifest.json").read_text())
    (bad / "manifest.json").write_text(json.dumps({**manifest, "experiment": "novelty"}))
    kept = {key: summary_of(bad)[key] for key in ("dtype", "rows", "passed", "failed_rows", "gates")}
    share = {"count": 1, "n": 4, "rate": 0.25, "wilson_95": [0.0456, 0.6994]}
    more = {"sites": {"layer 0": {"donor": share}}, "list": [{"a": 1, "b": None}, {"a": 2.5}], "note": "as <b>told</b>"}
    (bad / "summary.json").write_text(json.dumps({"experiment": "novelty", **kept, **more}))
    assert call("report", bad, "--out", tmp_path / "out", cwd=tmp_path).exit_code == 0
    page = Page((tmp_path / "out/report.html").read_text())
    assert page.tables["Sites"][1] == ["layer 0, donor", "1/4 = 25.0 % [4.6, 69.9]"]
    assert page.tables["list, novel"] == [["a", "b"], ["1", "none"], ["2.5", ""]]
    assert page.tables["Values"][1] == ["note", "as <b>told</b>"]
