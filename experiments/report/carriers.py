"""The blocks on carriers: whose suffix follows a partial transplant, by layer and by part."""

from typing import TYPE_CHECKING, Any

from experiments.report.blocks import Block, Figure, table
from experiments.report.charts import cell_grid, chart
from experiments.report.runs import Run
from experiments.report.values import rate, scalar, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = ("donor", "recipient", "neither")
NUMBERED = 14  # columns of a map up to which a cell has room for its count
# rows of the carrier map: (site name around the layer or count, label)
MAP = (
    ("layer_{}_keys", "K of layer i"),
    ("layer_{}_values", "V of layer i"),
    ("layer_{}", "layer i"),
    ("first_{}", "first i layers"),
    ("last_{}", "last i layers"),
)


def carrier_blocks(run: Run, summary: dict[str, Any]) -> list[Block]:
    """The maps of both directions, every site with its intervals, and the smallest ranges."""
    directions = list(next(iter(summary["sites"].values()), {}))
    header = ["site", *(f"{words(d)}: {side}" for d in directions for side in SIDES)]
    lines = [
        [words(site), *(rate(counts[d][side]) for d in directions for side in SIDES)]
        for site, counts in summary["sites"].items()
    ]
    ends = [
        [f"{end} k layers", words(direction), ", ".join(scalar(k) for k in found)]
        for end, by_direction in summary["smallest"].items()
        for direction, found in by_direction.items()
    ]
    return [
        *(
            carrier_figure(f"{run.anchor}-{number}", direction, summary["sites"])
            for number, direction in enumerate(directions)
        ),
        table(f"Whose suffix follows a partial transplant, {run.name}", header, lines),
        table("Fewest layers that give the donor's suffix", ["range", "direction", "k, one per row"], ends),
    ]


def carrier_figure(name: str, direction: str, sites: dict[str, Any]) -> Figure:
    """The share of rows that follow the donor, by layer and by what of it was transplanted."""
    depth = sum(site.startswith("layer_") and site.count("_") == 1 for site in sites)
    grid = [
        (label, [sites.get(pattern.format(i), {}).get(direction, {}).get("donor") for i in range(depth)])
        for pattern, label in MAP
    ]

    def draw(axes: "Axes") -> None:
        cells = [
            [
                (str(cell["count"]) if depth <= NUMBERED else "", 0.06 + 0.6 * cell["rate"], "first")
                if cell and cell["rate"] is not None
                else None
                for cell in line
            ]
            for _, line in grid
        ]
        cell_grid(axes, [label for label, _ in grid], list(map(str, range(depth))), cells)
        axes.set_xlabel("i")

    lines = [[label, *(rate(cell) if cell else "" for cell in cells)] for label, cells in grid]
    most = {label: max((cell["count"] for cell in cells if cell), default=0) for label, cells in grid}
    told = ", ".join(f"{label} {count}" for label, count in most.items())
    return chart(
        name,
        2.4,
        draw,
        f"{words(direction)}: rows whose suffix becomes the donor's, by what was transplanted; the darker, the more.",
        f"A map of layers against parts. Most rows that follow the donor: {told}.",
        table(f"Rows that follow the donor, {words(direction)}", ["part", *(str(i) for i in range(depth))], lines),
    )
