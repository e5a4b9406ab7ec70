"""Charts and drawings: well-formed SVG in the page's colours, the same bytes for the same numbers, a place for zero."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from experiments.report.blocks import Figure, Paragraph, Report, RowEntry, table
from experiments.report.charts import Drawing, cells, dots, histogram, linear, lines, logarithmic, short, standalone
from experiments.report.page import write_report
from tests.experiments.runs import call

SVG = "{http://www.w3.org/2000/svg}"
DATA = table("numbers", ["a"], [["1"], ["2"]])
NAME = "$x_1$ <b>&\u202e"
CHARTS = {
    "dots": lambda: dots("d", "c", DATA, [(NAME, [(1.0, (0.5, 2.0)), None]), ("b", [None, (-1.0, None)])],
                         "x", linear(-3, 3)),
    "histogram": lambda: histogram("h", "c", DATA, [(NAME, [1, 0]), ("b", [2, 7])], [0, 5, 10], "x"),
    "lines": lambda: lines("l", "c", DATA, [(NAME, [(0, 0.0), (1, 1e-4), (2, 0.02)]), ("b", [(1, None), (2, 0.5)])],
                           ("x", "y"), "exact"),
    "words": lambda: lines("w", "c", DATA, [(NAME, [(0, 3.0), (1, 4.0)])], ("x", "y"), words=["one", "whole"]),
    "cells": lambda: cells("g", "c", DATA, [("r", [(["1", "2"], 0.5, "first"), None])], ["p", "q"], ("x", "y")),
}  # fmt: skip


def texts(svg):
    return [element.text for element in ElementTree.fromstring(standalone(svg)).iter(f"{SVG}text")]


@pytest.mark.parametrize("kind", CHARTS)
def test_a_chart_is_svg_in_the_pages_colours_and_its_text_is_data(kind):
    svg = CHARTS[kind]().svg
    assert svg == CHARTS[kind]().svg and not re.search("#[0-9a-f]{3}|nan|inf", svg)
    assert kind == "cells" or "$x_1$ <b>&\\u202e" in texts(svg)


def test_values_have_their_place_and_zero_has_one_of_its_own():
    scale = logarithmic([0.0, 1e-4, 0.02], "exact")
    assert scale.ticks[0] == (0.0, "exact") and [label for _, label in scale.ticks[1:]] == [
        "0.0001",
        "0.001",
        "0.01",
        "0.1",
    ]
    places = [scale.place(value) for value in (0.0, 1e-4, 1e-3, 0.1)]
    assert places == sorted(places) and places[0] == 0.0 < places[1] and places[-1] == 1.0
    assert [label for _, label in logarithmic([1.0], "exact").ticks] == ["1", "10"]
    assert [label for _, label in linear(-2, 102).ticks] == ["0", "20", "40", "60", "80", "100"]
    assert linear(0, 10).place(5) == 0.5 and "exact" in texts(CHARTS["lines"]().svg)


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
