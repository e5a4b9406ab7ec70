"""Drawings as SVG text, written without a plotting library: the same numbers give the same bytes on every machine,
and no setting of the caller's (matplotlibrc, MPLBACKEND, fonts) can reach them.

Colours are the variables of `style.PALETTE`, so that an inline drawing follows the page into dark mode and print.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.report.blocks import visible
from experiments.report.style import SERIES, VARIABLES

WIDTH = 440.0
SIZE = 12.0  # of text, in units of the viewBox
GLYPH = 0.56  # average width of a character over its size, in a sans-serif face
MARKERS = ("circle", "square", "diamond", "triangle")
LINE = 17.0  # height of a legend's line


@dataclass(frozen=True)
class Look:
    """How a series is drawn: colour and marker of its points, dashes of its line."""

    colour: str
    marker: str
    dash: str = ""


@dataclass(frozen=True)
class Scale:
    """Maps the values low..high to the coordinates start..stop."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value)  # fmt: skip
        return self.start + (at - low) / ((high - low) or 1) * (self.stop - self.start)


def look(index: int) -> Look:
    """The look of series `index`: one colour and marker each."""
    return Look(SERIES[index % 4], MARKERS[index % 4])


def line_look(index: int) -> Look:
    """Lines in couples: one colour per couple, its two lines solid and dashed."""
    return Look(SERIES[index // 2 % 4], MARKERS[index % 4], "5 3" if index % 2 else "")


def text_width(text: str, size: float = SIZE) -> float:
    """The estimated width of a line of text."""
    return GLYPH * size * len(text)


def fitted(text: str, width: float, size: float = SIZE) -> str:
    """The text, its middle left out where it would be wider than `width`."""
    if text_width(text, size) <= width:
        return text
    half = max(1, int(width / (GLYPH * size)) // 2 - 1)
    return f"{text[:half]}…{text[-half:]}"


class Drawing:
    """SVG elements in drawing order on a page of width x height."""

    def __init__(self, height: float, width: float = WIDTH) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def svg(self) -> str:
        """The drawing as an inline <svg> element, without namespace and size."""
        return f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}">\n' + "\n".join(self._parts) + "\n</svg>"

    def rect(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        self._add("rect", x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), fill=fill, fill_opacity=opacity)

    def frame(self, x: float, y: float, width: float, height: float, stroke: str, fill: str = "panel") -> None:
        """A box with rounded corners and an outline."""
        self._add("rect", x=x, y=y, width=width, height=height, rx=5.0, fill=fill, stroke=stroke, stroke_width=1.2)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.0, dash: str = "") -> None:
        self.path([(x1, y1), (x2, y2)], stroke, width, dash)

    def path(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.4, dash: str = "") -> None:
        joined = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._add("polyline", points=joined, fill="none", stroke=stroke, stroke_width=width, stroke_dasharray=dash)

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, opacity: float = 1.0) -> None:
        self._add("polygon", points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points), fill=fill, fill_opacity=opacity)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        """A line with a head at its second end."""
        self.line(x1, y1, x2, y2, stroke, 1.4, dash)
        angle = math.atan2(y2 - y1, x2 - x1)
        wings = [(x2 - 8 * math.cos(angle + a), y2 - 8 * math.sin(angle + a)) for a in (-0.42, 0.42)]
        self.polygon([(x2, y2), *wings], stroke)

    def mark(self, x: float, y: float, style: Look, size: float = 3.6) -> None:
        """The marker of a series."""
        if style.marker == "circle":
            self._add("circle", cx=x, cy=y, r=size, fill=style.colour)
        elif style.marker == "square":
            self.rect(x - size, y - size, 2 * size, 2 * size, style.colour)
        elif style.marker == "diamond":
            s = 1.3 * size
            self.polygon([(x - s, y), (x, y - s), (x + s, y), (x, y + s)], style.colour)
        else:
            s = 1.25 * size
            self.polygon([(x - s, y + s), (x, y - s), (x + s, y + s)], style.colour)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: float = SIZE,
        fill: str = "ink",
        turn: float = 0.0,
        weight: str = "",
    ) -> None:
        """One line of text, its baseline at y; turn: degrees around its anchor."""
        turned = f"rotate({_n(turn)} {_n(x)} {_n(y)})" if turn else ""
        self._add("text", text, x=x, y=y, text_anchor=anchor, font_size=size, fill=fill, transform=turned,
                  font_weight=weight)  # fmt: skip

    def embed(self, svg: str, x: float, y: float, width: float) -> None:
        """Another drawing, scaled to `width`."""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(self.height - y)}"'
        self._parts.append(svg.replace("<svg ", f'<svg {place} preserveAspectRatio="xMinYMin" ', 1))

    def _add(self, tag: str, text: str | None = None, **attributes: str | float) -> None:
        written = []
        for key, value in attributes.items():
            if value == "" or (key == "fill_opacity" and value == 1.0):
                continue
            if key in ("fill", "stroke") and value != "none":
                value = f"var(--{value})"
            written.append(f'{key.replace("_", "-")}="{value if isinstance(value, str) else _n(value)}"')
        body = "/>" if text is None else f">{html.escape(visible(text), quote=False)}</{tag}>"
        self._parts.append(f"<{tag} {' '.join(written)}{body}")


class Plot(Drawing):
    """A drawing with one plot area; `legend` lines stand above it."""

    def __init__(self, area: float, left: float, legend: Sequence[tuple[str, Look]] = (), bottom: float = 40.0) -> None:
        top = 10.0 + LINE * len(legend)
        super().__init__(top + area + bottom)
        self.x0, self.x1, self.y0, self.y1 = left, WIDTH - 12.0, top, top + area
        for index, (label, style) in enumerate(legend):
            y = 9.0 + LINE * index
            self.line(left, y, left + 26, y, style.colour, 1.6, style.dash)
            self.mark(left + 13, y, style)
            self.text(left + 33, y + 4, fitted(label, WIDTH - left - 33))

    def x_scale(self, low: float, high: float, log: bool = False) -> Scale:
        return Scale(low, high, self.x0, self.x1, log)

    def y_scale(self, low: float, high: float, log: bool = False) -> Scale:
        """Values grow upwards."""
        return Scale(low, high, self.y1, self.y0, log)

    def x_axis(
        self, ticks: Sequence[tuple[float, str]], title: str = "", grid: bool = False, turn: float = 0.0
    ) -> None:
        """Labels at the coordinates given, below the plot area."""
        for x, label in ticks:
            if grid:
                self.line(x, self.y0, x, self.y1, "line", 0.7)
            self.line(x, self.y1, x, self.y1 + 4, "muted")
            if turn:
                self.text(x + 3, self.y1 + 15, label, "end", 11.0, turn=-turn)
            else:
                self.text(x, self.y1 + 17, label, "middle", 11.0)
        self.line(self.x0, self.y1, self.x1, self.y1, "muted")
        if title:
            self.text((self.x0 + self.x1) / 2, self.height - 5, title, "middle")

    def y_axis(self, ticks: Sequence[tuple[float, str]], title: str = "", grid: bool = False) -> None:
        """Labels at the coordinates given, left of the plot area."""
        for y, label in ticks:
            if grid:
                self.line(self.x0, y, self.x1, y, "line", 0.7)
            self.text(self.x0 - 7, y + 4, label, "end", 11.0)
        if title:
            self.text(12, (self.y0 + self.y1) / 2, title, "middle", turn=-90)


def ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """Round values within low..high, about `wanted` of them."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= wanted + 1)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def powers(low: float, high: float) -> list[float]:
    """The powers of ten within low..high, at most nine of them."""
    exponents = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    return [10.0**k for k in exponents[:: 1 + len(exponents) // 9]]


def standalone(svg: str) -> str:
    """An inline drawing as a file of its own, light or dark as its reader's system is."""
    width, height = svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = f"<style>\n{VARIABLES}text {{ font-family: system-ui, sans-serif; }}\n</style>"
    opening, rest = svg.split("\n", 1)
    return f"{opening.replace('<svg', head, 1)}\n{style}\n{rest}\n"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
