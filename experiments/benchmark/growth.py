"""Cost against context length: what each step takes, what a whole build takes, and what the cache holds."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from experiments.benchmark.bench import Measured
from experiments.report.blocks import Figure, table
from experiments.report.svg import Plot, line_look, ticks


def growth_entry(measured: Measured) -> dict[str, Any]:
    """From one incremental build: by the end of each block, seconds a step in it, seconds in all, bytes of K/V."""
    ends = measured.detail["ends"]
    sizes = [stop - start for start, stop in pairwise([0, *ends])]
    return {
        "length": measured.detail["length"],
        "ends": ends,
        "step_seconds": {n: [s / k for s, k in zip(found, sizes)] for n, found in measured.seconds.items()},
        "total_seconds": {n: list(accumulate(found)) for n, found in measured.seconds.items()},
        "cache_bytes": measured.detail["cache_bytes"],
        "load_average": list(measured.load),
    }


def growth_figures(document: dict[str, Any]) -> list[Figure]:
    """Three drawings over the context length."""
    growth, names = document["growth"], document["columns"]
    steps = {n: [s * 1e3 for s in growth["step_seconds"][n]] for n in names}
    held = {"K and V, two copies": [size / 1e6 for size in growth["cache_bytes"]]}
    return [
        _curves("growth-step", growth["ends"], steps, "ms a step", "Cost of a decode step against its context."),
        _curves(
            "growth-build",
            growth["ends"],
            growth["total_seconds"],
            "s in all",
            "Cost of a whole incremental build against its length.",
        ),
        _curves("growth-cache", growth["ends"], held, "MB", "Memory of the cache against its length."),
    ]


def _curves(name: str, ends: Sequence[int], curves: dict[str, list[float]], unit: str, caption: str) -> Figure:
    top = max(value for values in curves.values() for value in values)
    plot = Plot(170, 62, [(label, line_look(index)) for index, label in enumerate(curves)])
    x, y = plot.x_scale(0, ends[-1]), plot.y_scale(0, top)
    plot.x_axis([(x(v), f"{v:g}") for v in ticks(0, ends[-1], whole=True)], "tokens in the cache")
    plot.y_axis([(y(v), f"{v:g}") for v in ticks(0, top)], unit, grid=True)
    for index, values in enumerate(curves.values()):
        style, points = line_look(index), [(x(end), y(value)) for end, value in zip(ends, values)]
        plot.path(points, style.colour, 1.4, style.dash)
        for point in points:
            plot.mark(*point, style, 2.2)
    lines = [[str(end), *(f"{values[at]:.3g}" for values in curves.values())] for at, end in enumerate(ends)]
    told = "; ".join(f"{label}: {values[0]:.3g} {unit} to {values[-1]:.3g}" for label, values in curves.items())
    data = table(f"{caption[:-1]}, {unit}", ["tokens", *curves], lines, folded=True)
    return Figure(name, caption, f"Lines over the length. {told}.", data, plot.svg())
