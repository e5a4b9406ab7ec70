"""Charts: in the page's colours, the same bytes whatever a caller's matplotlib is set to, and left out without one."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from experiments.report.blocks import Paragraph, Report, RowEntry, table
from experiments.report.charts import chart, decades, short
from experiments.report.svg import Drawing, standalone
from experiments.report.write import write_report
from tests.experiments.commands import environment
from tests.experiments.report.page import Page
from tests.experiments.runs import call

matplotlib = pytest.importorskip("matplotlib")
DATA = table("numbers", ["a"], [["1"]])
ONE = """
from experiments.report.charts import chart, legend, line_look, log_scale
from experiments.report.blocks import table
def draw(axes):
    axes.plot([0, 1, 2], [0.0, 1e-4, 0.02], label="$x_1$ <b>&", **line_look(1))
    log_scale(axes, [0.0, 1e-4, 0.02], "exact")
    legend(axes)
print(chart("one", 3.0, draw, "caption", "told", table("numbers", ["a"], [["1"]])).svg)
"""
RC = b"text.usetex: True\nxtick.labelsize: 30\n"
PLAIN = "import matplotlib; print(matplotlib.rcParams['xtick.labelsize'])"


def python(script, cwd, **settings):
    kept = {k: v for k, v in environment().items() if k not in ("MPLBACKEND", "MATPLOTLIBRC")}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=cwd, env={**kept, **settings}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    done = python(ONE, tmp_path_factory.mktemp("plain"))
    assert done.returncode == 0 and "<svg" in done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("matplotlibrc", RC, {}),
        ("rc", RC, {"MATPLOTLIBRC": "rc", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}),
        ("rc", b"\xff\xfe no text", {"MATPLOTLIBRC": "rc", "MPLBACKEND": "no backend"}),
    ],
)
def test_a_users_settings_change_no_byte(expected, tmp_path, name, content, settings):
    (tmp_path / name).write_bytes(content)
    plain = python(PLAIN, tmp_path, **settings)
    assert plain.returncode or plain.stdout.startswith("30"), "the settings do not reach matplotlib at all"
    done = python(ONE, tmp_path, **settings)
    assert done.returncode == 0 and done.stdout == expected, done.stderr


def test_settings_of_the_process_are_neither_used_nor_changed(expected, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "xtick.labelsize", 30)
    monkeypatch.setitem(matplotlib.rcParams, "savefig.bbox", "tight")
    before = dict(matplotlib.rcParams), dict(os.environ)
    variables = {}
    exec(ONE, variables)
    svg = chart("one", 3.0, variables["draw"], "caption", "told", DATA).svg
    assert f"{svg}\n" == expected and (dict(matplotlib.rcParams), dict(os.environ)) == before
    assert chart("two", 3.0, variables["draw"], "caption", "told", DATA).svg != svg, "ids of two charts may not meet"


def test_text_of_a_chart_is_data_and_a_zero_has_a_place(expected):
    root = ElementTree.fromstring(standalone(expected))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "$x_1$ <b>&" in texts and "exact" in texts and "0.01" in texts
    assert "metadata" not in expected and "DejaVu" not in expected and "<style" not in expected


def test_drawings_use_the_readers_colours(written):
    drawings = re.findall(r"<svg.*?</svg>", written[0], re.DOTALL)
    assert len(drawings) > 10 and "var(--first)" in written[0] and "](figures/matrix-rates.svg)" in written[1]
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b(?!\")", re.sub(r'href="#\w+"|url\(#\w+\)', "", "".join(drawings)))


@pytest.fixture(scope="module")
def complete(reported, tmp_path_factory):
    """The report of one run with its charts."""
    out = tmp_path_factory.mktemp("complete")
    assert call("report", reported[2], "--out", out, cwd=out).exit_code == 0
    return out


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise RuntimeError('wrong\\nABI')", "matplotlib cannot be loaded: RuntimeError: wrong ABI"),
        ("import no_such_module", "matplotlib cannot be loaded: No module named 'no_such_module'"),
    ],
)
def test_a_broken_matplotlib_is_one_line(tmp_path, module, reason):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text(module)
    script = (
        "import sys; sys.path.insert(0, '.')\nfrom experiments.report.charts import unavailable; print(unavailable())"
    )
    done = python(script + ONE, tmp_path)
    assert done.stdout == f"{reason}\nNone\n" and not done.stderr, done.stderr


def test_without_matplotlib_the_page_has_everything_else(reported, complete, tmp_path):
    reason = "matplotlib is not installed; install it with: pip install -e '.[plots]'"
    script = "import sys; sys.modules['matplotlib'] = None\nfrom experiments.report.__main__ import main\n"
    done = python(f"{script}main({[str(reported[2]), '--out', 'without']!r})", tmp_path)
    assert done.returncode == 0 and done.stdout == "report: without/report.html\n" and not done.stderr, done.stderr
    texts = [(place / "report.html").read_text() for place in (complete, tmp_path / "without")]
    pages = [Page(text) for text in texts]
    assert pages[0].tables == pages[1].tables
    assert [one for one in pages[0].ids if not re.fullmatch(r"[mph][0-9a-f]{10}", one)] == pages[1].ids
    assert ["matplotlib" in text for text in texts] == [False, True]
    assert f"No charts: {reason}." in "".join(pages[1].text)
    left = {path.name for path in (tmp_path / "without/figures").iterdir()}
    assert left == {"design.svg"} < {path.name for path in (complete / "figures").iterdir()}
    linked = re.findall(r"\]\(figures/([^)]+)\)", (tmp_path / "without/report.md").read_text())
    assert set(linked) == left


def test_drawings_on_disk_are_svg_files(complete):
    for path in (complete / "figures").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def line(axes):
    axes.plot([0, 1])


def test_a_report_written_anew_leaves_no_file_of_the_earlier_one(tmp_path):
    rows = tuple(
        RowEntry("run", f"r{n}", f"row-{n}", (), frozenset(), {}, (Paragraph("x" * 50_000),)) for n in range(230)
    )
    figure = chart("old", 2.0, line, "caption", "told", DATA)
    write_report(Report("t", (figure,), rows), tmp_path)
    scripts, drawings = tmp_path / "rows", tmp_path / "figures"
    assert len(list(scripts.iterdir())) > 4 and (drawings / "old.svg").exists()
    foreign = {scripts / "99.js": "// mine", scripts / "notes.txt": "mine", drawings / "mine.svg": "<svg/>"}
    for path, text in foreign.items():
        path.write_text(text)
    write_report(Report("t", (chart("new", 2.0, line, "caption", "told", DATA),), rows[:20]), tmp_path)
    assert {*scripts.iterdir(), *drawings.iterdir()} == {*foreign, drawings / "new.svg"}
    assert all(path.read_text() == text for path, text in foreign.items())


def test_decades_and_short_names():
    assert (
        decades([0.02, 3.0, 0.0]) == (0.01, 10.0) and decades([0.0]) == (1e-8, 1e-7) and decades([1.0]) == (1.0, 10.0)
    )
    assert short("matrix-bf16") == "matrix-bf16"
    found = short("a" * 90 + "z", 30)
    assert len(found) == 30 and found.startswith("aaa") and found.endswith("az") and "…" in found
    assert short("\u202e") == r"\u202e"


def test_text_of_a_picture_is_data():
    picture = Drawing(10, 10)
    picture.text(0, 0, '<script>"&\u202e')
    assert "<script" not in picture.svg() and r"\u202e" in picture.svg()
    ElementTree.fromstring(standalone(picture.svg()))
