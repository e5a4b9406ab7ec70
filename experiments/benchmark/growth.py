"""Cost against context length: what each step takes, what a whole build takes, and what the cache holds."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from experiments.benchmark.bench import Measured
from experiments.report.blocks import Figure, table
from experiments.report.charts import chart, legend, line_look

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        _curves("growth-step", growth["ends"], steps, "ms per step", "Cost of a decode step against its context."),
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
    def draw(axes: "Axes") -> None:
        for index, (label, values) in enumerate(curves.items()):
            axes.plot(ends, values, label=label, markersize=4, **line_look(index))
        axes.set(xlim=(0, None), ylim=(0, None), xlabel="tokens in the cache", ylabel=unit)
        axes.grid(axis="y")
        legend(axes)

    lines = [[str(end), *(f"{values[at]:.3g}" for values in curves.values())] for at, end in enumerate(ends)]
    told = "; ".join(f"{label}: {values[0]:.3g} {unit} to {values[-1]:.3g}" for label, values in curves.items())
    data = table(f"{caption[:-1]}, {unit}", ["tokens", *curves], lines, folded=True)
    return chart(name, 2.6 + 0.25 * len(curves), draw, caption, f"Lines over the length. {told}.", data)
