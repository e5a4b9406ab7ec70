"""What all drawings share: axes, series, legends, and the logarithmic axis that can show zero."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.document import Figure, Table
from experiments.report.style import PALETTE, SERIES
from experiments.report.svg import SETTINGS, available, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.4  # inches; at a phone's width the text is still 10 px high
MARKERS = "osD^"
LINES = ("-", "--", "-.", ":")


def colour(name: str) -> str:
    """The light colour of a palette entry; the page swaps it for the reader's."""
    return PALETTE[name][0]


def figure(
    name: str, height: float, draw: Callable[["Axes"], None], caption: str, alternative: str, data: Table
) -> Figure:
    """One set of axes, drawn by `draw` where matplotlib is installed."""
    if not available():
        return Figure(name, caption, alternative, data, None)
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        made = drawing(WIDTH, height)
        draw(made.add_subplot())
        return Figure(name, caption, alternative, data, to_svg(made, name))


def look(index: int) -> dict[str, Any]:
    """Colour and marker of a series."""
    return {"color": colour(SERIES[index % 4]), "marker": MARKERS[index % 4]}


def line_look(index: int) -> dict[str, Any]:
    """Lines in couples: one colour a couple, its two lines solid and dashed."""
    return {"color": colour(SERIES[index // 2 % 4]), "marker": MARKERS[index % 4], "linestyle": LINES[index % 2]}


def bar(axes: "Axes", value: float, bounds: Sequence[float] | None, y: float, index: int) -> None:
    """A mark with its interval, at height `y`; the look of series `index`."""
    if bounds is not None:
        axes.plot(bounds, [y, y], color=look(index)["color"], linewidth=2.2, solid_capstyle="butt")
    axes.plot([value], [y], markersize=6, linestyle="none", **look(index))


def name_rows(axes: "Axes", labels: Sequence[str]) -> None:
    """One named row a label, the first on top."""
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def legend(axes: "Axes", labels: Sequence[str], styles: Sequence[dict[str, Any]]) -> None:
    """Above the axes, so that it never covers a mark. styles: line properties, or {"patch": COLOUR} for an area."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=style["patch"], alpha=0.75) if "patch" in style else Line2D([], [], markersize=5, **style)
        for style in styles
    ]
    made = axes.legend(handles, list(labels), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9.5, borderpad=0.2)
    for text in made.get_texts():
        text.set_parse_math(False)


def decades(axes: "Axes", floor: float, largest: float, exact: bool) -> None:
    """A logarithmic axis whose floor stands for zero, which it could not show."""
    powers = range(round(math.log10(floor)) + 1, math.ceil(math.log10(largest)) + 1)
    ticks = [*([(floor, "exact")] if exact else []), *((10.0**power, f"1e{power}") for power in powers)]
    axes.set_yscale("log")
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.minorticks_off()
    axes.set_ylim(floor / 1.6 if exact else floor * 6, 10.0 ** powers[-1] * 1.6)
    axes.grid(axis="y", linewidth=0.7)


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
