"""The section on carriers: whose suffix follows a partial transplant, by layer and by part."""

from typing import TYPE_CHECKING, Any

from experiments.harness.markdown import rate
from experiments.report.document import Block, Figure, table
from experiments.report.drawing import colour, figure
from experiments.report.grids import box, plain
from experiments.report.runs import Run
from experiments.report.values import scalar, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = ("donor", "recipient", "neither")
NUMBERED = 14  # cells in a row of a map that still have room for a number
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
        table("Fewest layers that give the donor's suffix", ["range", "direction", "k, one a row"], ends),
    ]


def carrier_figure(name: str, direction: str, sites: dict[str, Any]) -> Figure:
    """The share of rows that follow the donor, by layer and by what of it was transplanted."""
    depth = sum(site.startswith("layer_") and site.count("_") == 1 for site in sites)
    grid = [
        (label, [sites.get(pattern.format(i), {}).get(direction, {}).get("donor") for i in range(depth)])
        for pattern, label in MAP
    ]

    def draw(axes: "Axes") -> None:
        for y, (_, cells) in enumerate(grid):
            for x, cell in enumerate(cells):
                if cell and cell["rate"] is not None:
                    box(axes, x, y, 1, 1, colour("first"), 0.06 + 0.6 * cell["rate"])
                    if depth <= NUMBERED:
                        axes.text(x + 0.5, y + 0.5, str(cell["count"]), ha="center", va="center", fontsize=9)
        step = max(1, depth // 12)
        axes.set_xticks([i + 0.5 for i in range(0, depth, step)], [str(i) for i in range(0, depth, step)])
        axes.set_yticks([y + 0.5 for y in range(len(grid))], [label for label, _ in grid])
        axes.set_xlabel("i")
        plain(axes, depth, len(grid))

    lines = [[label, *(rate(cell) if cell else "" for cell in cells)] for label, cells in grid]
    most = {label: max((cell["count"] for cell in cells if cell), default=0) for label, cells in grid}
    told = ", ".join(f"{label} {count}" for label, count in most.items())
    return figure(
        name,
        2.5,
        draw,
        f"{words(direction)}: rows whose suffix becomes the donor's, by what was transplanted; the darker, the more.",
        f"A map of layers against parts. Most rows that follow the donor: {told}.",
        table(f"Rows that follow the donor, {words(direction)}", ["part", *(str(i) for i in range(depth))], lines),
    )
