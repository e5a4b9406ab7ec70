"""Charts and drawings: in the page's colours, the same bytes whatever matplotlib is set to, left out without it."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from experiments.report.blocks import Figure, Paragraph, Report, RowEntry, Table
from experiments.report.charts import NO_MARK, cells, dots, histogram, lines, scatter, short, standalone
from experiments.report.figures import accuracy_figure
from experiments.report.page import write_report
from experiments.report.runs import Pair, Run
from stats.endpoints import compare_labels
from tests.experiments.commands import python
from tests.experiments.report.page import Page
from tests.experiments.runs import call

matplotlib = pytest.importorskip("matplotlib")
NAN, SVG, NAME = NO_MARK[0], "{http://www.w3.org/2000/svg}", "$x_1$ <b>&\u202e"
DATA = Table("numbers", [NAME, "a", "b"], [[NAME, "1", "2"], ["s", "3", "4"]])
CURVE = [(0, 0.0), (1, 1e-4), (2, 0.02)]
INTERVALS = [(NAME, [(1.0, 0.5, 2.0), NO_MARK]), ("b", [(-1.0, NAN, NAN), (2.0, 1.0, 3.0)])]
POINTS = [(NAME, [(0.1, 0.0), (0.2, 0.3)]), ("b", [(0.1, 5.0)])]
MARK = r'style="fill: var\(--(?:first|second)\)'
INTERVAL = r'<path d="[^"]*" clip-path="[^"]*" style="[^"]*stroke-width: 2.2"'
ONE = """
from experiments.report.charts import lines
from experiments.report.blocks import Table
print(lines("one", "", Table("numbers", [], []), [("a", [(0, 0.0), (1, 0.02)])], ("x", "y"), "exact").svg)
"""


def kinds(name):
    """One chart of every kind, with its marks: one per number, and one per series in a legend."""
    axes = ("x", "y")
    return {
        "dots": (dots(name, "", DATA, INTERVALS, "x", (-3, 3)), 3 + 2),
        "histogram": (histogram(name, "", DATA, [(NAME, [1, 2, 7]), ("b", [8])], [0, 5, 10], "x"), 4 + 2),
        "log": (lines(name, "", DATA, [(NAME, CURVE), ("b", [(1, None), (2, 0.5)])], axes, "exact"), 4 + 2),
        "words": (lines(name, "", DATA, [(NAME, [("one", 3), ("all", 4)])], axes), 2 + 1),
        "cells": (cells(name, "", DATA, [[(1, 0.5), None], [(3, 1.0), (0, 0.0)]], "x"), 3),
        "scatter": (scatter(name, "", DATA, POINTS, axes, ("level", 2.0)), 3 + 2),
    }


CHARTS = kinds("one")


def texts(svg):
    return [element.text for element in ElementTree.fromstring(standalone(svg)).iter(f"{SVG}text")]


@pytest.mark.parametrize("kind", CHARTS)
def test_a_chart_has_the_pages_colours_and_a_mark_per_number_whatever_the_process_has_set(kind, monkeypatch):
    figure, marks = CHARTS[kind]
    assert len(re.findall(MARK, figure.svg)) == marks and "$x_1$ <b>&\\u202e" in texts(figure.svg)
    assert not re.search('#[0-9a-f]{6}[;"]|\\bnan\\b|metadata|DejaVu|<style|xmlns', figure.svg)
    monkeypatch.setitem(matplotlib.rcParams, "xtick.labelsize", 30)
    monkeypatch.setitem(matplotlib.rcParams, "savefig.bbox", "tight")
    before = dict(matplotlib.rcParams)
    assert kinds("one")[kind][0].svg == figure.svg and dict(matplotlib.rcParams) == before
    ids = [set(re.findall(' id="([^"]*)"', one.svg)) for one in (figure, kinds("two")[kind][0])]
    assert ids[0] and not ids[0] & ids[1], "ids of two charts may not meet"


def test_a_users_settings_change_no_byte(tmp_path):
    (tmp_path / "rc").write_text("text.usetex: True\nxtick.labelsize: 30\n")
    show, broken = "import matplotlib; print(matplotlib.rcParams['xtick.labelsize'])", {"MPLBACKEND": "no backend"}
    controls = [python("-c", show, cwd=tmp_path, **more) for more in ({"MATPLOTLIBRC": "rc"}, broken)]
    assert controls[0].stdout == "30.0\n" and controls[1].returncode, "the settings do not reach matplotlib at all"
    done = python("-c", ONE, cwd=tmp_path, MATPLOTLIBRC="rc", **broken)
    data, curve = Table("numbers", [], []), [("a", [(0, 0.0), (1, 0.02)])]
    assert done.stdout == f"{lines('one', '', data, curve, ('x', 'y'), 'exact').svg}\n", done.stderr
    assert "<svg" in done.stdout


def test_zero_has_a_place_of_its_own():
    assert {"exact", "0.0001", "0.01", "1"} <= set(texts(CHARTS["log"][0].svg))
    assert {"tie", "1", "10", "level"} <= set(texts(CHARTS["scatter"][0].svg))
    assert "exact" not in texts(lines("n", "", DATA, [("a", [(0, 0.1)])], ("x", "y"), "exact").svg)


def test_an_accuracy_without_an_interval_is_a_dot_alone():
    assert len(re.findall(INTERVAL, CHARTS["dots"][0].svg)) == 2
    summary = {"accuracy": compare_labels([True], [True], 0).accuracy_dict("a", "b")}
    figure = accuracy_figure("x", [Pair(Run(Path(), "r", "r", {}, {}), "bf16", ("a", "b"), summary, [])])
    assert len(re.findall(MARK, figure.svg)) == 1 and not re.search(INTERVAL, figure.svg)
    assert "no interval" in figure.alternative


def test_drawings_use_the_readers_colours_and_stand_beside_the_page_as_files(written, markdown):
    html = (written / "report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) > 10 and "var(--first)" in html
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b(?!\")", re.sub(r'href="#\w+"|url\(#\w+\)', "", "".join(drawings)))
    names = {path.name for path in (written / "figures").iterdir()}
    assert names == set(re.findall(r"\]\(figures/([^)]+)\)", markdown)) > {"design.svg", "matrix-rates.svg"}
    assert all(ElementTree.parse(written / "figures" / name).getroot().tag == f"{SVG}svg" for name in names)


def test_without_matplotlib_the_page_has_everything_else(reported, page, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call("report", *reported, "--out", tmp_path, cwd=tmp_path).output == f"report: {tmp_path}/report.html\n"
    bare = Page((tmp_path / "report.html").read_text())
    assert page.tables == bare.tables
    assert [one for one in page.ids if not re.fullmatch(r"[mp][0-9a-f]{10}", one)] == bare.ids
    note = "No charts: matplotlib is not installed; install it with: pip install 'stage-replay[plots]'."
    assert [note in "".join(one.text) for one in (page, bare)] == [False, True]
    drawings = set(re.findall(r"\]\(figures/([^)]+)\)", (tmp_path / "report.md").read_text()))
    assert drawings == {path.name for path in (tmp_path / "figures").iterdir()} == {"design.svg"}


def test_a_broken_matplotlib_is_one_line(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text("raise RuntimeError('wrong\\nABI')")
    script = "import sys; sys.path.insert(0, '.')\nfrom experiments.report.charts import missing; print(missing())"
    done = python("-c", script + ONE, cwd=tmp_path)
    assert done.stdout == "matplotlib cannot be loaded: RuntimeError: wrong ABI\n\n" and not done.stderr, done.stderr


def test_a_report_written_anew_leaves_no_file_of_the_earlier_one(tmp_path):
    rows = [RowEntry("run", f"r{n}", f"row-{n}", (), frozenset(), {}, [Paragraph("x" * 50_000)]) for n in range(230)]
    old, new = (Figure(name, "caption", DATA, lambda: '<svg viewBox="0 0 1 1">\n</svg>') for name in ("old", "new"))
    write_report(Report("t", [old], rows), tmp_path)
    scripts, drawings = tmp_path / "rows", tmp_path / "figures"
    assert len(list(scripts.iterdir())) > 30 and (drawings / "old.svg").exists()
    foreign = {scripts / "99.js": "// mine", scripts / "notes.txt": "mine", drawings / "mine.svg": "<svg/>"}
    for path, text in foreign.items():
        path.write_text(text)
    write_report(Report("t", [new], rows[:20]), tmp_path)
    assert {*scripts.iterdir(), *drawings.iterdir()} == {*foreign, drawings / "new.svg"}
    assert all(path.read_text() == text for path, text in foreign.items())


def test_short_names():
    assert short("matrix-bf16") == "matrix-bf16" and short("\u202e") == r"\u202e"
    found = short("a" * 90 + "z", 30)
    assert len(found) == 30 and found.startswith("aaa") and found.endswith("az") and "…" in found
