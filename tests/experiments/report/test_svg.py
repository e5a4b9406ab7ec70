"""The page's drawings: in its own colours, reproducible, and nothing is lost without matplotlib."""

import re
import subprocess
import sys

import pytest

from experiments.report.svg import available
from tests.experiments.commands import environment
from tests.experiments.report.page import Page
from tests.experiments.runs import call


@pytest.mark.skipif(not available(), reason="matplotlib is not installed")
def test_drawings_use_the_readers_colours_and_the_same_runs_give_the_same_bytes(reported, written, tmp_path):
    assert "<svg" in written[0] and "var(--first)" in written[0] and "](figures/matrix-rates.svg)" in written[1]
    drawings = "".join(re.findall(r"<svg.*?</svg>", written[0], re.DOTALL))
    assert "#1f5fa9" not in drawings, "a colour of the light palette was left in a drawing"
    done = call("report", *reported, "--out", tmp_path, cwd=tmp_path)
    assert done.exit_code == 0
    assert ((tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()) == written
    assert (tmp_path / "figures/matrix-rates.svg").read_text().startswith("<svg ")


def test_without_matplotlib_the_page_has_every_table_and_no_drawing(reported, written, tmp_path):
    blocked = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'report'\n"
        "from experiments.report.__main__ import main; main()"
    )
    command = [sys.executable, "-c", blocked, *map(str, reported), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "report.html").read_text()
    assert "<svg" not in html and not (tmp_path / "figures").exists()
    assert Page(html).tables == Page(written[0]).tables
