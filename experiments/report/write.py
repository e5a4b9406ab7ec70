"""A report on disk: Markdown with its drawings beside it, and the page."""

from pathlib import Path

from experiments.harness.ledger import write_whole
from experiments.report.blocks import Report, figures
from experiments.report.html import render_html
from experiments.report.markdown import FIGURES, render_markdown
from experiments.report.svg import standalone

MARKDOWN, PAGE = "report.md", "report.html"


def write_report(report: Report, out: Path) -> Path:
    """Writes report.md, its drawings under figures/, report.html and its row files; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    for figure in figures(report.blocks):
        (out / FIGURES).mkdir(exist_ok=True)
        write_whole(out / FIGURES / f"{figure.name}.svg", standalone(figure.svg))
    write_whole(out / MARKDOWN, render_markdown(report))
    page, files = render_html(report)
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_whole(out / name, text)
    write_whole(out / PAGE, page)
    return out / PAGE
