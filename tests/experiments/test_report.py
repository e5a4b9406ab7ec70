"""Reporting runs as they are: failures are loud, contradictions refused, the unknown reported whole."""

import json
import shutil
import sys
from collections import Counter

import pytest

from experiments.report.rows import row_entry
from experiments.report.runs import read_runs
from experiments.report.sections import experiment_section, glance, provenance
from experiments.run.designs import matrix_summary
from experiments.run.summary import gate_counts, matched_prefixes
from minimodel.errors import InputError
from tests.experiments.report.page import HOSTILE, Page
from tests.experiments.runs import call, change_at, ledger, manifest_of, one_line, rewrite, summary_of
from tests.helpers import edit_json


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """They take most of a report's time and have their own tests."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def altered(path, to, change=lambda rows: None, **manifest):
    """A copy of a matrix run with changed rows, its summary made anew, and changed fields of the manifest."""
    shutil.copytree(path, to)
    rows = ledger(to)
    change(rows)
    rewrite(to, rows)
    edit_json(to / "manifest.json", row_order=[row["row"] for row in rows], **manifest)
    (to / "summary.json").write_text(json.dumps(matrix_summary("bf16", rows)))
    return to


def report(tmp_path, *runs):
    """The command's outcome and its page."""
    done = call("report", *runs, "--out", tmp_path / "out", cwd=tmp_path)
    return done, Page((tmp_path / "out/report.html").read_text())


def test_a_failed_gate_is_loud_and_its_row_id_harmless(reported, tmp_path):
    def fail(rows):
        rows[0]["row"] = HOSTILE
        rows[0]["gates"]["replica_live"] = rows[0]["passed"] = False

    bad = altered(reported[0], tmp_path / "matrix-bad", fail)
    done, page = report(tmp_path, bad)
    assert done.exit_code == 3 and "FAILED: matrix-bad: row" in done.output
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags and tags.count("script") == 1
    assert ("p", {"class": "alert"}) in page.tags and ("p", {"class": "verdict"}) not in page.tags
    gates = {row[0]: row[1] for row in page.tables["Integrity gates, rows passed"]}
    n = len(ledger(bad))
    assert gates["replica live"] == f"{n - 1}/{n} FAILED" and gates["argmax"] == f"{n}/{n}"
    assert "**FAILED:** matrix-bad: row" in (tmp_path / "out/report.md").read_text()


def test_an_unfinished_run_gives_no_numbers(reported, tmp_path):
    shutil.copytree(reported[0], tmp_path / "matrix-cut")
    lines = (tmp_path / "matrix-cut/rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "matrix-cut/rows.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    done, page = report(tmp_path, tmp_path / "matrix-cut")
    assert done.exit_code == 3 and f"unfinished, 2 of {len(lines)} rows" in done.output
    assert "Prefill against live" not in page.tables


def test_a_verdict_of_the_summary_and_runs_made_differently_are_said(reported, tmp_path):
    for name, cpu, threads in (("a", "one", 1), ("b", "two", 2)):
        run = shutil.copytree(reported[0], tmp_path / name)
        manifest = manifest_of(run)
        numeric = [{**one, "threads": threads} for one in manifest["numeric"]]
        edit_json(run / "manifest.json", environment={**manifest["environment"], "cpu": cpu}, numeric=numeric)
    edit_json(run / "summary.json", passed=False)
    done, page = report(tmp_path, tmp_path / "a", run)
    assert done.exit_code == 3 and "FAILED: b: the summary says that a gate failed" in done.output
    text = "".join(page.text)
    assert "come from 2 different environments" in text and "hold several numeric contracts for bf16" in text


def fail_silently(run):
    """A row that failed, in the counts of the gates too, under a summary that says that all passed."""
    rows = ledger(run)
    rows[0]["passed"] = rows[0]["gates"]["argmax"] = False
    rewrite(run, rows)
    edit_json(run / "summary.json", gates=gate_counts(rows))


def test_a_replication_with_a_failed_gate_has_no_interpretation(reported, tmp_path):
    run = shutil.copytree(reported[3], tmp_path / "later")
    fail_silently(run)
    edit_json(run / "summary.json", passed=False, failed_rows=[ledger(run)[0]["row"]], interpretation=None)
    done, page = report(tmp_path, run)
    text = "later: a gate failed, so that no interpretation is given"
    assert done.exit_code == 3 and text in "".join(page.text) and "Frozen interpretation" not in "".join(page.text)


def edit_row(run, path, change):
    """Changes the first row at a path, sealed anew, as another version of the code may have written it."""
    rows = ledger(run)
    change_at(rows[0], path, change)
    rewrite(run, rows)


def damage(run):
    rows = (run / "rows.jsonl").read_text()
    (run / "rows.jsonl").write_text(rows.replace('"index":0', '"index":7', 1))


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (lambda run: (run / "manifest.json").unlink(), ("expected a run directory", "no manifest")),
        (lambda run: edit_json(run / "summary.json", passed=False, gates={}), ("summary.json: gates",)),
        (lambda run: edit_json(run / "summary.json", rows=1), ("summary.json: rows",)),
        (lambda run: edit_json(run / "manifest.json", environment=[]), ("manifest.json: environment: expected dict",)),
        (fail_silently, ("summary.json: passed: expected False",)),
        (damage, ("line 1", "damage")),
        (
            lambda run: edit_json(run / "manifest.json", visibility=None),
            ("manifest.json: visibility: expected list, found None",),
        ),
        (lambda run: edit_json(run / "manifest.json", caps={"merge": "28"}), ("caps.merge: expected int, found '28'",)),
        (lambda run: edit_json(run / "manifest.json", information=[]), ("manifest.json: information: expected dict",)),
        (
            lambda run: edit_json(run / "summary.json", first_divergence=5),
            ("summary.json: first_divergence: expected dict",),
        ),
        (
            lambda run: edit_row(run, "arms.live.suffix.0", lambda token: str(token)),
            ("row ", "arms.live.suffix[0]: expected int"),
        ),
        (
            lambda run: edit_row(run, "comparisons.live:prefill.cache.layers.0.key", lambda drift: {}),
            ("the field 'relative_l2', found none",),
        ),
        (lambda run: (run / "timing.jsonl").write_text("[]\n"), ("timing.jsonl: [0]: expected dict",)),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(reported, tmp_path, break_it, parts):
    shutil.copytree(reported[0], tmp_path / "run")
    break_it(tmp_path / "run")
    one_line(call("report", tmp_path / "run", "--out", tmp_path / "out", cwd=tmp_path), *parts)
    assert not (tmp_path / "out").exists()


def test_a_report_never_takes_the_place_of_a_runs_own(reported, tmp_path):
    run = shutil.copytree(reported[0], tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert "choose another --out" in one_line(call("report", run, "--out", run, cwd=tmp_path))
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_the_same_run_twice_and_an_empty_folder_are_refused(reported, tmp_path):
    one_line(call("report", reported[0], reported[0], cwd=tmp_path), "each run once")
    one_line(call("report", cwd=tmp_path), "python -m experiments.study")


def test_an_experiment_never_heard_of_is_reported_whole(reported, tmp_path):
    bad = altered(reported[0], tmp_path / "novel", experiment="novelty")
    kept = {key: summary_of(bad)[key] for key in ("dtype", "rows", "passed", "failed_rows", "gates")}
    share = {"count": 1, "n": 4, "rate": 0.25, "wilson_95": [0.0456, 0.6994]}
    more = {"sites": {"layer 0": {"donor": share}}, "list": [{"a": 1, "b": None}, {"a": 2.5}], "note": "in <b>bold</b>"}
    more |= {"score": {"correct": 1, "n": 4}, "pairs": [[1, [2]], [3]]}
    more |= {"effect": {"difference_points": 1.0, "bootstrap_95": [-3.5, 5.5], "bootstrap_note": None, "p": 0.5}}
    (bad / "summary.json").write_text(json.dumps({"experiment": "novelty", **kept, **more}))
    done, page = report(tmp_path, bad)
    assert done.exit_code == 0
    assert page.tables["Sites"][1] == ["layer 0, donor", "1/4 = 25.0 % [4.6, 69.9]"]
    assert page.tables["list, novel"] == [["a", "b"], ["1", "none"], ["2.5", ""]]
    values = dict(page.tables["Values"][1:])
    assert values["note"] == "in <b>bold</b>" and values["score"] == "1/4", values
    assert page.tables["pairs, novel"] == [["item"], ["1 1; 2 2"], ["3"]]
    assert values["effect"] == "+1.0 points, 95 % [-3.5, +5.5]; p 0.5", values


def test_two_matrices_are_joined_by_their_prefixes(every_run, tmp_path):
    pair = (every_run["matrix"], every_run["matrix-fp32"])
    done, page = report(tmp_path, *pair)
    prefixes = [[row["prefix"] for row in ledger(run)] for run in pair]
    same = sum(a == b for a, b in zip(*prefixes))
    assert f"matrices: bf16 and fp32 reached one integer prefix on {same} of {len(prefixes[0])} rows" in done.stdout
    rows = dict(page.tables["Boundary prefixes of matrix-bf16 and matrix-fp32"][1:])
    assert rows["one integer prefix"].startswith(f"{same}/{len(prefixes[0])}")
    # another task file is another matrix: nothing is joined
    other = shutil.copytree(pair[1], tmp_path / "other")
    edit_json(other / "manifest.json", tasks_sha256="0" * 64)
    assert "matrices:" not in report(tmp_path, pair[0], other)[0].stdout


def test_differing_prefixes_make_a_precision_surface_comparison():
    rows = [{"row": name, "prefix": {"tokens": [1, 2], "sha256": "x"}} for name in "abc"]
    same = matched_prefixes(rows, rows, ("bf16", "fp32"))
    assert same["prefix_identity"]["count"] == 3 and same["reading"].endswith("a fixed-prefix precision effect.")
    other = [*rows[:2], {"row": "c", "prefix": {"tokens": [1, 3], "sha256": "y"}}]
    found = matched_prefixes(rows, other, ("bf16", "fp32"))
    assert found["prefix_identity"]["count"] == 2 and "precision-surface comparison" in found["reading"]
    # a row that failed closed has no prefix, and is not counted
    failed = matched_prefixes(rows, [{"row": "a", "failure": "NaN"}, *rows[1:]], ("bf16", "fp32"))
    assert failed["rows"] == failed["prefix_identity"]["n"] == 2


def kinds(value, depth=3):
    """Every object in `value` down to `depth`, lists by their first item."""
    found = [value] if isinstance(value, dict) else []
    for inner in value.values() if isinstance(value, dict) else value[:1] if isinstance(value, list) else ():
        found += kinds(inner, depth - 1) if depth else []
    return found


def parts(run):
    """What the page takes from one run's manifest, summary and first row."""

    def of_run():
        glance([run]), provenance(run), experiment_section(run.experiment, [run])

    row = run.rows[0]
    return {
        "manifest": (run.manifest, of_run),
        "summary": (run.summary, of_run),
        "row": (row, lambda: row_entry(run, row, "x")),
    }


def test_a_field_that_an_older_run_lacks_is_tolerated_or_named_in_one_line(every_run):
    outcomes = Counter()
    for path in map(every_run.get, ("fixed_prefix", "transplant", "causes", "carrier")):
        for name, (part, build) in parts(read_runs([path])[0]).items():
            for place in kinds(part):
                for key in list(place):
                    value = place.pop(key)
                    try:
                        build()
                        outcomes[name, "tolerated"] += 1
                    except InputError as error:
                        assert f"expected the field {key!r}" in str(error) and str(path) in str(error)
                        outcomes[name, "named"] += 1
                    place[key] = value
    assert len(outcomes) == 6 and min(outcomes.values()) > 5, outcomes
