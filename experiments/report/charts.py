"""The colours of drawings, and charts by matplotlib, the extra `plots`.

Colours are the variables of PALETTE, so that a drawing within a page follows it into dark mode and print. Series differ
by marker and line as well as by colour. A chart is drawn over matplotlib's defaults: no matplotlibrc, backend or
setting of a caller changes it, and the same numbers give the same bytes.
"""

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from experiments.report.blocks import Figure, Table, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# name: (light, dark); a page has each as the variable --NAME
PALETTE: dict[str, tuple[str, str]] = {
    "page": ("#fefefe", "#15181c"),
    "ink": ("#1b1f24", "#e7e9ec"),
    "muted": ("#59636e", "#a3acb6"),
    "line": ("#d3d8de", "#3a414a"),
    "panel": ("#f3f5f7", "#1e2329"),
    "first": ("#1f5fa9", "#83b8f3"),
    "second": ("#b4500f", "#f2a46c"),
    "third": ("#2e7d4f", "#83cf9f"),
    "fourth": ("#7a4aa5", "#c6a1ea"),
    "fail": ("#b3141d", "#ff9a94"),
}
SERIES = ("first", "second", "third", "fourth")
ROLE_COLOURS = ("muted", "first", "third", "fourth", "second", "fail")  # by raw role: prompt, branches, merge, answer
_LIGHT, _DARK = (" ".join(f"--{name}: {pair[k]};" for name, pair in PALETTE.items()) for k in (0, 1))
VARIABLES = f"""\
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}
"""
Point = tuple[float, float]


def standalone(svg: str) -> str:
    """Returns an inline drawing as a file, light or dark as its reader's system is."""
    width, height = svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = f"<style>\n{VARIABLES}text {{ font-family: system-ui, sans-serif; }}\n</style>"
    opening, rest = svg.split("\n", 1)
    return f"{opening.replace('<svg', head, 1)}\n{style}\n{rest}\n"


def short(text: str, length: int = 48) -> str:
    """Returns the text with control characters spelled out, its middle left out beyond `length` characters."""
    text, half = visible(text), length // 2
    return text if len(text) <= length else f"{text[: half - 1]}…{text[-half:]}"


WIDTH = 6.1  # inches of a chart, each of 72 units
LIGHT = {name: light for name, (light, _) in PALETTE.items()}  # replaced by the variables in the SVG
NO_MARK = (math.nan, math.nan, math.nan)
LOOKS = [LIGHT[name] for name in SERIES]
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled
    "text.parse_math": False,  # run names are data
    "font.size": 11.5,
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib: the layout is the same on every machine
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["ink"]),
    "axes.edgecolor": LIGHT["muted"],
    "axes.prop_cycle": f"cycler(color={LOOKS * 2}, markerfacecolor={LOOKS + [LIGHT['page']] * 4}, "
    f"marker={list('osD^' * 2)}, linestyle={['-', '--'] * 4})",
}
Series = Sequence[tuple[str, Sequence[Any]]]  # (label, values)
Names = tuple[str, str]  # of the axes x and y
Draw = Callable[["Axes"], None]


def missing() -> str:
    """Loads matplotlib, without the user's settings: it refuses some. Returns why it cannot be loaded, or ""."""
    try:
        with patch.dict(os.environ, MATPLOTLIBRC=os.devnull, MPLBACKEND="svg"):
            import matplotlib
            import matplotlib.backends.backend_svg  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return "matplotlib is not installed; install it with: pip install 'stage-replay[plots]'"
        return f"matplotlib cannot be loaded: {visible(f'{type(error).__name__}: {error}')}"
    return ""


def _chart(name: str, caption: str, data: Table, height: float, names: Names, draw: Draw) -> Figure:
    """Returns a figure that `draw` draws on axes about `height` inches high, below a legend of labelled series."""

    def drawn() -> str:
        import matplotlib.figure

        buffer = io.StringIO()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({**SETTINGS, "svg.hashsalt": name})  # the salt makes ids unique within a page
            canvas = matplotlib.figure.Figure(layout="constrained")
            axes = canvas.add_subplot(xlabel=names[0], ylabel=names[1])
            draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            if labels:
                canvas.legend(handles, [short(label) for label in labels], loc="outside upper left")
            canvas.set_size_inches(WIDTH, height + 0.7 + 0.25 * len(labels))
            canvas.savefig(buffer, format="svg")
        return _inline(buffer.getvalue())

    return Figure(name, caption, data, lambda: "" if missing() else drawn())


def _inline(text: str) -> str:
    """Returns matplotlib's SVG as an element of a page: without size and namespaces, in the page's colours and font."""
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<svg\b[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
    used = set(re.findall(r"#([\w.-]+)", text))  # markers and clip paths; other ids would stand twice in a page
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", "system-ui, sans-serif", text.replace("xlink:href", "href"))
    for variable, light in LIGHT.items():
        text = text.replace(light, f"var(--{variable})")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _log_axis(axes: "Axes", axis: str, values: Sequence[float], zero: str) -> Point:
    """Makes an axis logarithmic and returns the powers of ten around the positive values; where some are 0, 0 has a
    tick below them, labelled `zero`."""
    logs = [math.log10(value) for value in values if value > 0] or [-8.0]
    low, decades = 10.0 ** math.floor(min(logs)), max(math.ceil(max(logs)) - math.floor(min(logs)), 1)
    high = low * 10.0**decades
    getattr(axes, f"set_{axis}scale")("symlog", linthresh=low, linscale=0.3 + 0.12 * decades)
    getattr(axes, f"set_{axis}lim")(-0.3 * low if 0 in values else 0.8 * low, 1.3 * high)
    getattr(axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{value:g}" if value else zero)
    return low, high


def _name_rows(axes: "Axes", data: Table) -> None:
    """Labels the rows, the first on top, by the first cells of the table's rows."""
    axes.set_yticks(range(len(data.rows)), [short(str(row[0]), 40) for row in data.rows])
    axes.set_ylim(len(data.rows) - 0.5, -0.5)
    axes.spines[:].set_visible(False)


def dots(name: str, caption: str, data: Table, series: Series, axis_name: str, limits: Point) -> Figure:
    """Returns a chart of a (value, low, high) per series and row of the table: a mark with its interval. NO_MARK draws
    no mark, and bounds that are nan draw no interval."""
    step = min(0.25, 0.7 / len(series))

    def draw(axes: "Axes") -> None:
        for index, (label, marks) in enumerate(series):
            places = [row + (index - (len(series) - 1) / 2) * step for row in range(len(marks))]
            values, lows, highs = zip(*marks)
            [line] = axes.plot(values, places, linestyle="none", label=label)
            axes.hlines(places, lows, highs, color=line.get_color(), linewidth=2.2)
        _name_rows(axes, data)
        axes.set_xlim(limits)

    return _chart(name, caption, data, len(data.rows) * (0.2 + 0.16 * len(series)), (axis_name, ""), draw)


def histogram(name: str, caption: str, data: Table, series: Series, edges: Sequence[int], axis_name: str) -> Figure:
    """Returns a chart of how many values of each series lie in each bin."""

    def draw(axes: "Axes") -> None:
        labels, values = zip(*series)
        axes.hist(values, bins=edges, label=labels, rwidth=0.85)
        axes.locator_params(integer=True)

    return _chart(name, caption, data, 2.3, (axis_name, "rows"), draw)


def lines(name: str, caption: str, data: Table, series: Series, names: Names, zero: str = "") -> Figure:
    """Returns a chart of a line per series of points (x, y); x are whole numbers or words, and y None is no point.

    zero: makes y logarithmic, and labels 0 on it; without it both axes start at 0.
    """

    def draw(axes: "Axes") -> None:
        for label, points in series:
            axes.plot(*zip(*points), label=label)
        flat = [point for _, points in series for point in points]
        if not any(isinstance(x, str) for x, _ in flat):
            axes.locator_params(axis="x", integer=True)
        if zero:
            _log_axis(axes, "y", [y for _, y in flat if y is not None], zero)
        else:
            axes.set(xlim=(0, None), ylim=(0, None))

    return _chart(name, caption, data, 2.3, names, draw)


def cells(name: str, caption: str, data: Table, found: Sequence[Sequence[Point | None]], axis_name: str) -> Figure:
    """Returns a chart of a (count, share) per cell of the table, the darker, the larger the share; None is no cell."""
    columns, step = data.header[1:], 1 + len(data.header) // 16

    def draw(axes: "Axes") -> None:
        from matplotlib.colors import LinearSegmentedColormap

        ramp = LinearSegmentedColormap.from_list("share", [(LIGHT["first"], 0.06), (LIGHT["first"], 0.66)])
        shares = [[math.nan if cell is None else cell[1] for cell in row] for row in found]
        corners = ([k - 0.5 for k in range(n + 1)] for n in (len(columns), len(found)))
        axes.pcolormesh(*corners, shares, cmap=ramp, vmin=0, vmax=1, edgecolors=LIGHT["page"], linewidth=2)
        for y, row in enumerate(found if step == 1 else ()):
            for x, cell in enumerate(row):
                axes.text(x, y, "" if cell is None else f"{cell[0]:g}", ha="center", va="center")
        _name_rows(axes, data)
        axes.set_xticks(range(0, len(columns), step), [short(str(one), 40) for one in columns[::step]])
        axes.grid(visible=False)

    return _chart(name, caption, data, 0.4 * len(data.rows), (axis_name, ""), draw)


def scatter(name: str, caption: str, data: Table, series: Series, names: Names, level: tuple[str, float]) -> Figure:
    """Returns a chart of a mark per point (x, y) over logarithmic axes, shaded where y is less than x, with a labelled
    line at one y; y 0 is a tie."""

    def draw(axes: "Axes") -> None:
        for label, points in series:
            axes.plot(*zip(*points), linestyle="none", label=label)
        flat = [point for _, points in series for point in points]
        ends = _log_axis(axes, "x", [x for x, _ in flat], "0")
        _log_axis(axes, "y", [level[1], *(y for _, y in flat)], "tie")
        axes.fill_between(ends, ends, axes.get_ylim()[0], color=LIGHT["muted"], alpha=0.15, linewidth=0)
        axes.plot(ends, ends, color=LIGHT["muted"], linestyle="--", marker="", linewidth=1.2)
        axes.axhline(level[1], color=LIGHT["ink"], linestyle=":", linewidth=1, label=level[0])

    return _chart(name, caption, data, 2.8, names, draw)
