"""The page's drawings: in its own colours, the same bytes whatever a caller's plotting library is set to."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from experiments.report.svg import Plot, Scale, fitted, powers, standalone, text_width, ticks
from tests.experiments.commands import environment


def test_drawings_use_the_readers_colours(written):
    assert "<svg" in written[0] and "var(--first)" in written[0] and "](figures/matrix-rates.svg)" in written[1]
    drawings = "".join(re.findall(r"<svg.*?</svg>", written[0], re.DOTALL))
    assert not re.search(r'(fill|stroke)="#', drawings), "a drawing has a colour that dark mode cannot change"


def test_a_users_plotting_settings_change_no_byte_and_no_library_is_needed(reported, written, tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nxtick.labelsize: 30\n")
    blocked = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'report'\n"
        "from experiments.report.__main__ import main; main()"
    )
    command = [sys.executable, "-c", blocked, *map(str, reported), "--out", str(tmp_path / "out")]
    hostile = environment(MPLBACKEND="module://matplotlib_inline.backend_inline", MATPLOTLIBRC=str(tmp_path))
    done = subprocess.run(command, env=hostile, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert ((out / "report.html").read_text(), (out / "report.md").read_text()) == written
    for path in (out / "figures").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_scales_and_ticks():
    assert [Scale(0, 10, 100, 200)(v) for v in (0, 5, 10)] == [100, 150, 200]
    assert [Scale(1, 100, 0, 20, log=True)(v) for v in (1, 10, 100)] == [0, 10, 20]
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100] and ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert ticks(-5, 5, 4) == [-4, -2, 0, 2, 4] and ticks(0, 0)
    assert powers(0.02, 30) == [0.1, 1, 10] and len(powers(1e-30, 1)) <= 9


def test_a_long_name_is_shortened_to_its_place():
    assert fitted("matrix-bf16", 190) == "matrix-bf16"
    short = fitted("a" * 90 + "z", 190)
    assert text_width(short) <= 190 and short.startswith("aaa") and short.endswith("az") and "…" in short


def test_text_of_a_drawing_is_data():
    plot = Plot(10, 10)
    plot.text(0, 0, '<script>"&\u202e')
    assert "<script" not in plot.svg() and r"\u202e" in plot.svg()
    ElementTree.fromstring(standalone(plot.svg()))
