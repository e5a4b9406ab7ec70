"""Pictures of boxes, arrows and text as SVG, and the form of every drawing that is a file.

Colours are the variables of `style.PALETTE`, so that an inline drawing follows the page into dark mode and print.
"""

import html
import math
from collections.abc import Sequence

from experiments.report.blocks import visible
from experiments.report.style import VARIABLES

SIZE = 12.0  # of text, in units of the viewBox
GLYPH = 0.56  # average width of a character over its size, in a sans-serif face


def text_width(text: str, size: float = SIZE) -> float:
    """The estimated width of a line of text."""
    return GLYPH * size * len(text)


class Drawing:
    """SVG elements in drawing order on a page of width x height."""

    def __init__(self, height: float, width: float) -> None:
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
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width, stroke_dasharray=dash)

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, opacity: float = 1.0) -> None:
        self._add("polygon", points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points), fill=fill, fill_opacity=opacity)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        """A line with a head at its second end."""
        self.line(x1, y1, x2, y2, stroke, 1.4, dash)
        angle = math.atan2(y2 - y1, x2 - x1)
        wings = [(x2 - 8 * math.cos(angle + a), y2 - 8 * math.sin(angle + a)) for a in (-0.42, 0.42)]
        self.polygon([(x2, y2), *wings], stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: float = SIZE,
        fill: str = "ink",
        weight: str = "",
    ) -> None:
        """One line of text, its baseline at y."""
        self._add("text", text, x=x, y=y, text_anchor=anchor, font_size=size, fill=fill, font_weight=weight)

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


def standalone(svg: str) -> str:
    """An inline drawing as a file of its own, light or dark as its reader's system is."""
    width, height = svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = f"<style>\n{VARIABLES}text {{ font-family: system-ui, sans-serif; }}\n</style>"
    opening, rest = svg.split("\n", 1)
    return f"{opening.replace('<svg', head, 1)}\n{style}\n{rest}\n"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
