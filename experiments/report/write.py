"""A report on disk: Markdown with its drawings beside it, and the page."""

from dataclasses import replace
from pathlib import Path

from experiments.report.blocks import Alert, Report, figures
from experiments.report.browser import FOLDER, HEAD
from experiments.report.charts import unavailable
from experiments.report.html import render_html
from experiments.report.markdown import FIGURES, render_markdown
from experiments.report.style import VARIABLES
from experiments.report.svg import standalone
from experiments.run.ledger import write_whole

MARKDOWN, PAGE = "report.md", "report.html"


def write_report(report: Report, out: Path) -> Path:
    """Writes report.md, its drawings under figures/, report.html and its row files; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = {figure.name: figure.svg for figure in figures(report.blocks)}
    if not all(drawn.values()):
        report = replace(report, blocks=(Alert(f"No charts: {unavailable()}.", "Note"), *report.blocks))
    for name, svg in drawn.items():
        if svg:
            (out / FIGURES).mkdir(exist_ok=True)
            write_whole(out / FIGURES / f"{name}.svg", standalone(svg))
    write_whole(out / MARKDOWN, render_markdown(report))
    page, files = render_html(report)
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_whole(out / name, text)
    write_whole(out / PAGE, page)
    _remove_old(out / FOLDER, HEAD, {Path(name).name for name in files})
    _remove_old(out / FIGURES, VARIABLES, {f"{name}.svg" for name, svg in drawn.items() if svg})
    return out / PAGE


def _remove_old(folder: Path, mark: str, kept: set[str]) -> None:
    """Removes the files of an earlier report that this one does not use. Only files with the report's `mark` go."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in kept and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                own = mark.encode() in file.read(4096)
            if own:
                path.unlink()
