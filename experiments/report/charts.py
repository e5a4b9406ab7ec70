"""Drawings and charts as SVG: marks with intervals, histograms, lines, grids of cells.

Colours are the variables of PALETTE, so that a drawing within a page follows it into dark mode and print. Series differ
by marker and line as well as by colour.
"""

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.report.blocks import Table, visible

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
WIDTH = 440  # of a chart
Point = tuple[float, float]


class Drawing:
    """SVG elements in drawing order, with coordinates from 0 to width and height."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def svg(self) -> str:
        """Returns the inline <svg> element, without namespace and size."""
        return "\n".join([f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}">', *self._parts, "</svg>"])

    def add(self, tag: str, text: str | None = None, /, **attributes: str | float) -> None:
        """Adds an element. `fill` and `stroke` are names in PALETTE or "none"; an empty attribute is left out."""
        for key in {"fill", "stroke"} & set(attributes):
            attributes[key] = f"var(--{attributes[key]})" if attributes[key] != "none" else "none"
        shown = [f'{key.replace("_", "-")}="{_n(value)}"' for key, value in attributes.items() if value != ""]
        body = "/>" if text is None else f">{html.escape(visible(text), quote=False)}</{tag}>"
        self._parts.append(f"<{tag} {' '.join(shown)}{body}")

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: str | float) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def line(self, points: Sequence[Point], stroke: str, width: float = 1, dash: str = "") -> None:
        drawn = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.add("polyline", points=drawn, fill="none", stroke=stroke, stroke_width=width, stroke_dasharray=dash)

    def polygon(self, points: Sequence[Point], fill: str, **more: str | float) -> None:
        self.add("polygon", points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points), fill=fill, **more)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        """Adds a line with a head at its second end."""
        self.line([(x1, y1), (x2, y2)], stroke, 1.4, dash)
        angle = math.atan2(y2 - y1, x2 - x1)
        wings = [(x2 - 8 * math.cos(angle + a), y2 - 8 * math.sin(angle + a)) for a in (-0.42, 0.42)]
        self.polygon([(x2, y2), *wings], stroke)

    def text(
        self, x: float, y: float, text: str, size: float = 11, fill: str = "ink", anchor: str = "", weight: str = ""
    ) -> None:
        """Adds one line of text, its baseline at y."""
        self.add("text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, font_weight=weight)

    def box(self, x: float, y: float, width: float, height: float, stroke: str, lines: Sequence[str] = ()) -> None:
        """Adds a frame with rounded corners around centred lines, of which the first is a title."""
        self.rect(x, y, width, height, "panel", rx=5, stroke=stroke, stroke_width=1.2)
        top = y + height / 2 - 8 * (len(lines) - 1) + 2
        for k, line in enumerate(lines):
            size, fill, weight = (11, "ink", "") if k else (13, stroke, "600")
            self.text(x + width / 2, top + 17 * k, line, size, fill, "middle", weight)


def _n(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


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


class Scale(NamedTuple):
    """Where a value lies between the ends of an axis, from 0 to 1, and the axis's labelled values."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def linear(low: float, high: float) -> Scale:
    """Returns a scale with at most seven round ticks; at whole numbers if its ends are int."""
    least = 0 if isinstance(low, int) and isinstance(high, int) else -9
    step = next(w * 10**k for k in range(least, 12) for w in (1, 2, 5) if high - low <= 6 * w * 10**k)
    ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Scale(lambda value: (value - low) / (high - low), [(tick, f"{tick:.6g}") for tick in ticks])


def logarithmic(values: Sequence[float], zero: str) -> Scale:
    """Returns a scale over the decades of the positive values; where some are 0, its low end is 0, labelled `zero`."""
    logs = [math.log10(value) for value in values if value > 0] or [-8.0]
    low, gap = math.floor(min(logs)), 0.12 if 0 in values else 0.0
    high = max(math.ceil(max(logs)), low + 1)
    ticks = [(0.0, zero)] * bool(gap) + [(10.0**k, f"{10.0**k:g}") for k in range(low, high + 1)]
    return Scale(lambda v: gap + (1 - gap) * (math.log10(v) - low) / (high - low) if v > 0 else 0.0, ticks)


def named(labels: Sequence[object], downwards: bool = False) -> Scale:
    """Returns a scale on which value k is the middle of part k of equal parts; across, at most 14 have labels."""
    n, step = len(labels), 1 if downwards else 1 + len(labels) // 15
    ticks = [(k, short(str(label), 40)) for k, label in enumerate(labels)][::step]
    return Scale(lambda k: 1 - (k + 0.5) / n if downwards else (k + 0.5) / n, ticks)


class Chart(Drawing):
    """A plot area with a grid, tick labels, the names of its axes and a legend above it."""

    def __init__(self, x: Scale, y: Scale, names: tuple[str, str], legend: Sequence[object] = (), height: float = 190):
        self.top = 10 + 18 * len(legend) + 20 * bool(names[1])
        super().__init__(WIDTH, self.top + height + 42)
        self.scales, self.bottom, self.right = (x, y), self.top + height, WIDTH - 14.0
        self.left = 14 + 6 * max(len(label) for _, label in y.ticks)
        for index, label in enumerate(legend):
            self.mark(index, 10, 10 + 18 * index)
            self.text(22, 14 + 18 * index, short(str(label)))
        self.text(0, self.top - 9, names[1], fill="muted")
        self.text((self.left + self.right) / 2, self.height - 6, names[0], fill="muted", anchor="middle")
        for value, label in x.ticks:
            self.line([(self.x(value), self.top), (self.x(value), self.bottom)], "line", 0.7)
            self.text(self.x(value), self.bottom + 16, label, anchor="middle")
        for value, label in y.ticks:
            self.line([(self.left, self.y(value)), (self.right, self.y(value))], "line", 0.7)
            self.text(self.left - 7, self.y(value) + 4, label, anchor="end")

    def x(self, value: float) -> float:
        return self.left + self.scales[0].place(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.scales[1].place(value) * (self.bottom - self.top)

    def mark(self, index: int, x: float, y: float) -> None:
        """Adds the marker of series `index`: a disc, square, diamond or triangle, hollow from the fifth series on."""
        corners, turn = ((24, 0), (4, math.pi / 4), (4, 0), (3, -math.pi / 2))[index % 4]
        angles = [turn + 2 * math.pi * k / corners for k in range(corners)]
        points = [(x + 4.5 * math.cos(a), y + 4.5 * math.sin(a)) for a in angles]
        self.polygon(points, "page" if index % 8 > 3 else SERIES[index % 4], stroke=SERIES[index % 4])


# The charts below draw what a table says: one mark, bar, point or cell per cell, by the numbers in its text.


def numbers(cell: object) -> list[float]:
    """Returns the numbers in a cell's text."""
    return [float(one) for one in re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?", str(cell))]


def dots(data: Table, axis: str, x: Scale) -> str:
    """Returns a mark with its interval per cell such as '2/6 = 33.3 % [9.7, 70.0]' or '+1.0 points, no interval'."""
    pattern = re.compile(r"(\S+) (?:%|points)(?:(?:, 95 %)? \[(.*)\])?")
    columns = [[pattern.search(str(cell)) for cell in column] for column in zip(*data.rows)]
    series = [(name, column) for name, column in list(zip(data.header, columns))[1:] if any(column)]
    step, height = min(0.25, 0.7 / max(len(series), 1)), len(data.rows) * (14 + 12 * len(series))
    rows = named([row[0] for row in data.rows], downwards=True)
    chart = Chart(x, rows, (axis, ""), [name for name, _ in series], height)
    for index, (_, column) in enumerate(series):
        for place, found in enumerate(column):
            if found:
                y = chart.y(place + (index - (len(series) - 1) / 2) * step)
                chart.line([(chart.x(bound), y) for bound in numbers(found[2] or "")], SERIES[index % 4], 2.2)
                chart.mark(index, chart.x(float(found[1])), y)
    return chart.svg()


def histogram(data: Table, axis: str) -> str:
    """Returns a bar per count; the rows are bins such as '5 to 9', evenly spaced."""
    bins = [numbers(row[0]) for row in data.rows]
    counts = [[int(str(cell)) for cell in row[1:]] for row in data.rows]
    across = linear(int(bins[0][0]), int(bins[-1][1]) + 1)
    chart = Chart(across, linear(0, max(map(max, counts))), (axis, "rows"), data.header[1:])
    width = 0.85 * (chart.right - chart.left) / len(bins) / len(counts[0])
    for (edge, _), row in zip(bins, counts):
        for index, count in enumerate(row):
            left, top = chart.x(edge) + width * (index + 0.09 * len(row)), chart.y(count)
            chart.rect(left, top, width, chart.bottom - top, SERIES[index % 4])
    return chart.svg()


def lines(data: Table, axis_names: tuple[str, str], zero: str = "") -> str:
    """Returns a line per column over the first column, of whole numbers or of words. An empty cell has no point.

    zero: makes y logarithmic, and labels 0 on it; without it both axes start at 0.
    """
    first, *columns = zip(*data.rows)
    words = not all(str(cell).isdecimal() for cell in first)
    places = [k if words else int(str(cell)) for k, cell in enumerate(first)]
    series = [[(place, numbers(cell)[0]) for place, cell in zip(places, c) if numbers(cell)] for c in columns]
    heights = [y for points in series for _, y in points]
    across, up = named(first) if words else linear(0, max(places)), linear(0, 1.05 * max(heights))
    chart = Chart(across, logarithmic(heights, zero) if zero else up, axis_names, data.header[1:])
    for index, points in enumerate(series):
        drawn = [(chart.x(x), chart.y(y)) for x, y in points]
        chart.line(drawn, SERIES[index % 4], 1.8, "6 3" if index % 2 else "")
        for x, y in drawn:
            chart.mark(index, x, y)
    return chart.svg()


def cells(data: Table, axis_names: tuple[str, str]) -> str:
    """Returns the table's cells, the darker, the larger the share that a count has of 'count/n' or of its row."""
    depth, rows = 30, named([row[0] for row in data.rows], downwards=True)
    chart = Chart(named(data.header[1:]), rows, axis_names, height=depth * len(data.rows))
    width = (chart.right - chart.left) / len(data.header[1:])
    for y, row in enumerate(data.rows):
        total = sum(numbers(cell)[0] for cell in row[1:] if numbers(cell)) or 1
        for x, found in enumerate(map(numbers, row[1:])):
            if found:
                left, top = chart.x(x) - width / 2, chart.y(y) - depth / 2
                share = found[0] / (found[1] if len(found) > 1 else total)
                chart.rect(left + 1, top + 1, width - 2, depth - 2, "first", fill_opacity=0.06 + 0.6 * share)
                if len(row) <= 15:
                    chart.text(chart.x(x), chart.y(y) + 4, f"{found[0]:g}", anchor="middle")
    return chart.svg()
