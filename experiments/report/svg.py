"""From a matplotlib drawing to SVG text: reproducible, without outside references, in the page's own colours."""

import io
import re
from typing import TYPE_CHECKING, Any

from experiments.report.style import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


def available() -> bool:
    """Whether matplotlib (the extra `plots`) can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def drawing(width: float, height: float) -> "Drawing":
    """An empty drawing, width x height in inches, that the SVG writer alone renders: no display, no global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    made = Drawing(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(made)
    made.patch.set_alpha(0)
    return made


SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled
    "font.size": 10.5,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), PALETTE["ink"][0]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), PALETTE["ink"][0]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), PALETTE["muted"][0]),
    "grid.color": PALETTE["line"][0],
}


def to_svg(made: "Drawing", name: str) -> str:
    """The drawing as a standalone SVG file; the same drawing gives the same bytes."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def inline(svg: str, name: str, label: str) -> str:
    """A standalone SVG as an element of the page: its ids made unique, its colours the page's, `label` (already
    escaped) its text alternative.
    """
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'\bhref="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    for variable, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{variable})")
    # width and height go: the style sheet sizes the figure, the viewBox keeps its proportions
    text = re.sub(r'(<svg\b[^>]*?)\s+width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?)\s+height="[^"]*"', r"\1", text, count=1)
    return text.strip().replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
