"""Charts and drawings: well-formed SVG in the page's colours, the same bytes for the same numbers, a place for zero."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from experiments.report.blocks import Figure, Paragraph, Report, RowEntry, table
from experiments.report.charts import Drawing, cells, dots, histogram, linear, lines, logarithmic, short, standalone
from experiments.report.figures import accuracy_figure
from experiments.report.page import write_report
from experiments.report.runs import Pair, Run
from stats.endpoints import compare_labels
from tests.experiments.runs import call

SVG = "{http://www.w3.org/2000/svg}"
DATA = table("numbers", ["a"], [["1"], ["2"]])
NAME = "$x_1$ <b>&\u202e"


def series(*rows):
    return table("numbers", ["", NAME, "b"], rows)


CHARTS = {
    "dots": dots(series(["r", "1/9 = 1.0 % [0.5, 2.0]", "1/0"], ["s", "", "-1.0 points, none"]), "x", linear(-3, 3)),
    "histogram": histogram(series(["0 to 4", "1", "2"], ["5 to 9", "0", "7"]), "x"),
    "lines": lines(series(["0", "0", ""], ["1", "1e-04", "0.5"], ["2", "0.02", "3"]), ("x", "y"), "exact"),
    "words": lines(series(["one", "3 (1/2 exact)", "1"], ["whole", "4", "none"]), ("x", "y")),
    "cells": cells(series(["r", "1/2 = 50.0 % [1, 99]", ""], ["s", "3", "0"]), ("x", "y")),
}


def texts(svg):
    return [element.text for element in ElementTree.fromstring(standalone(svg)).iter(f"{SVG}text")]


@pytest.mark.parametrize("kind", CHARTS)
def test_a_chart_is_svg_in_the_pages_colours_and_its_text_is_data(kind):
    assert not re.search("#[0-9a-f]{3}|nan|inf", CHARTS[kind]) and "$x_1$ <b>&\\u202e" in texts(CHARTS[kind])


def test_a_chart_has_one_mark_per_number_of_its_table():
    polygons = {kind: CHARTS[kind].count("<polygon") for kind in CHARTS}
    assert polygons == {"dots": 4, "histogram": 2, "lines": 7, "words": 5, "cells": 0}  # two of each are the legend's
    assert CHARTS["cells"].count("<rect") == 3 and CHARTS["histogram"].count("<rect") == 4


def test_values_have_their_place_and_zero_has_one_of_its_own():
    scale = logarithmic([0.0, 1e-4, 0.02], "exact")
    assert scale.ticks[0] == (0.0, "exact")
    assert [label for _, label in scale.ticks[1:]] == ["0.0001", "0.001", "0.01", "0.1"]
    places = [scale.place(value) for value in (0.0, 1e-4, 1e-3, 0.1)]
    assert places == sorted(places) and places[0] == 0.0 < places[1] and places[-1] == 1.0
    assert [label for _, label in logarithmic([1.0], "exact").ticks] == ["1", "10"]
    assert [label for _, label in linear(-2, 102).ticks] == ["0", "20", "40", "60", "80", "100"]
    assert linear(0, 10).place(5) == 0.5 and "exact" in texts(CHARTS["lines"])


def test_an_accuracy_without_an_interval_is_a_dot_alone():
    run = Run(Path(), "r", "r", {}, [], {}, [])
    summary = {"accuracy": compare_labels([True], [True], 0).accuracy_dict("a", "b")}
    figure = accuracy_figure("x", [Pair(run, "bf16", ("a", "b"), summary, [])])
    assert figure.svg.count("<polygon") == 2 and "no interval" in figure.alternative  # one is the legend's


def test_drawings_use_the_readers_colours(written):
    drawings = re.findall(r"<svg.*?</svg>", written[0], re.DOTALL)
    assert len(drawings) > 10 and "var(--first)" in written[0] and "](figures/matrix-rates.svg)" in written[1]
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b", "".join(drawings))


def test_drawings_on_disk_are_svg_files(reported, tmp_path):
    assert call("report", reported[2], "--out", tmp_path, cwd=tmp_path).exit_code == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == set(re.findall(r"\]\(figures/([^)]+)\)", (tmp_path / "report.md").read_text())) > {"design.svg"}
    for name in names:
        assert ElementTree.parse(tmp_path / "figures" / name).getroot().tag == f"{SVG}svg"


def test_a_report_written_anew_leaves_no_file_of_the_earlier_one(tmp_path):
    rows = tuple(
        RowEntry("run", f"r{n}", f"row-{n}", (), frozenset(), {}, (Paragraph("x" * 50_000),)) for n in range(230)
    )
    old, new = (Figure(name, "caption", DATA, lambda: '<svg viewBox="0 0 1 1">\n</svg>') for name in ("old", "new"))
    write_report(Report("t", (old,), rows), tmp_path)
    scripts, drawings = tmp_path / "rows", tmp_path / "figures"
    assert len(list(scripts.iterdir())) > 30 and (drawings / "old.svg").exists()
    foreign = {scripts / "99.js": "// mine", scripts / "notes.txt": "mine", drawings / "mine.svg": "<svg/>"}
    for path, text in foreign.items():
        path.write_text(text)
    write_report(Report("t", (new,), rows[:20]), tmp_path)
    assert {*scripts.iterdir(), *drawings.iterdir()} == {*foreign, drawings / "new.svg"}
    assert all(path.read_text() == text for path, text in foreign.items())


def test_short_names():
    assert short("matrix-bf16") == "matrix-bf16"
    found = short("a" * 90 + "z", 30)
    assert len(found) == 30 and found.startswith("aaa") and found.endswith("az") and "…" in found
    assert short("\u202e") == r"\u202e"


def test_text_of_a_drawing_is_data():
    picture = Drawing(10, 10)
    picture.text(0, 0, '<script>"&\u202e')
    assert "<script" not in picture.svg() and r"\u202e" in picture.svg()
    ElementTree.fromstring(standalone(picture.svg()))
