"""Charts as SVG text, drawn by matplotlib, the extra `plots`.

Every chart is drawn over matplotlib's own defaults: no matplotlibrc, backend or setting of a caller reaches it, and the
same numbers give the same bytes. Colours become the CSS variables of `style.PALETTE`, so that a chart follows its page
into dark mode and print.
"""

import functools
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.blocks import Figure, Table, visible
from experiments.report.style import PALETTE, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 6.1  # inches of 72 units
LIGHT = {name: light for name, (light, _) in PALETTE.items()}  # replaced by the variables when the SVG is written
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled
    "text.parse_math": False,  # run names are data
    "font.size": 11.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib: the layout is the same on every machine
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "grid.linewidth": 0.7,
    "grid.color": LIGHT["line"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["muted"]),
}


@functools.cache
def unavailable() -> str | None:
    """Loads matplotlib. Returns why it cannot be loaded, or None."""
    own = {name: os.environ.pop(name) for name in ("MPLBACKEND", "MATPLOTLIBRC") if name in os.environ}
    os.environ["MATPLOTLIBRC"] = os.devnull
    try:
        import matplotlib
        import matplotlib.backends.backend_svg  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "matplotlib":
            return "matplotlib is not installed; install it with: pip install -e '.[plots]'"
        return f"matplotlib cannot be loaded: {visible(str(error))}"
    except Exception as error:  # whatever a broken installation raises
        return f"matplotlib cannot be loaded: {visible(f'{type(error).__name__}: {error}')}"
    finally:
        del os.environ["MATPLOTLIBRC"]
        os.environ.update(own)
    return None


def chart(name: str, height: float, draw: Callable[["Axes"], None], caption: str, told: str, data: Table) -> Figure:
    """A figure whose drawing `draw` makes on one set of axes, `height` inches high.

    told: the text alternative. data: the numbers shown.
    """
    return Figure(name, caption, told, data, lambda: _svg(name, height, draw))


def _svg(name: str, height: float, draw: Callable[["Axes"], None]) -> str | None:
    """The chart as an inline <svg> element; None where matplotlib cannot be loaded."""
    if unavailable():
        return None
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**SETTINGS, "svg.hashsalt": name})  # the salt makes ids unique within a page
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(canvas)
        draw(canvas.add_subplot())
        canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(buffer.getvalue())


def _inline(text: str) -> str:
    """matplotlib's SVG file as an element of a page: without size and namespaces, in the page's colours and font."""
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<svg\b[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
    used = set(re.findall(r"#([\w.-]+)", text))  # markers and clip paths; other ids would stand twice in a page
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", "system-ui, sans-serif", text.replace("xlink:href", "href"))
    for variable, light in LIGHT.items():
        text = text.replace(light, f"var(--{variable})")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def look(index: int) -> dict[str, Any]:
    """Colour and marker of series `index`."""
    return {"color": LIGHT[SERIES[index % 4]], "marker": "osD^"[index % 4]}


def line_look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of line `index`: each two lines share a colour, solid and dashed."""
    return {**look(index // 2), "marker": "osD^"[index % 4], "linestyle": ("-", "--")[index % 2]}


def short(text: str, length: int = 48) -> str:
    """The text with control characters spelled out, its middle left out beyond `length` characters."""
    text, half = visible(text), length // 2
    return text if len(text) <= length else f"{text[: half - 1]}…{text[-half:]}"


def legend(axes: "Axes") -> None:
    """Above the axes, where it covers no mark."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0.2)


def bar(axes: "Axes", value: float, bounds: Sequence[float] | None, y: float, index: int, label: str = "") -> None:
    """A mark with its interval at height `y`."""
    if bounds is not None:
        axes.hlines(y, bounds[0], bounds[1], color=look(index)["color"], linewidth=2.2)
    axes.plot([value], [y], linestyle="none", label=label, **look(index))


def name_rows(axes: "Axes", labels: Sequence[str]) -> None:
    """One label per row of bars, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around the positive values."""
    positive = [value for value in values if value > 0] or [1e-8]
    low = 10.0 ** math.floor(math.log10(min(positive)))
    return low, max(10.0 ** math.ceil(math.log10(max(positive))), 10 * low)


def log_scale(axes: "Axes", values: Sequence[float], zero: str) -> None:
    """A logarithmic y axis over the values; below its decades, a line for those that are 0, labelled `zero`."""
    low, high = decades(values)
    if 0 in values:
        axes.set_yscale("symlog", linthresh=low, linscale=0.3 + 0.12 * math.log10(high / low))
        axes.set_ylim(-0.3 * low, 1.3 * high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, 1.3 * high)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value else zero)
    axes.minorticks_off()
    axes.grid(axis="y")


def cell_grid(
    axes: "Axes", rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[tuple[str, float, str] | None]]
) -> None:
    """Cells of (text, opacity, colour), rows downwards; None leaves a cell out."""
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            if cell is not None:
                text, opacity, colour = cell
                axes.barh(y, 0.96, 0.94, left=x - 0.48, color=LIGHT[colour], alpha=opacity)
                axes.text(x, y, text, ha="center", va="center", linespacing=1.5)
    step = 1 + len(columns) // 14
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
