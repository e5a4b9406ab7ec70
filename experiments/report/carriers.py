"""The blocks on carriers: whose suffix follows a partial transplant, by layer and by part."""

from typing import Any

from experiments.report.blocks import Block, Figure, table
from experiments.report.runs import Run
from experiments.report.svg import Plot, text_width
from experiments.report.values import rate, scalar, words

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

    plot = Plot(26.0 * len(grid), 14 + max(text_width(label) for label, _ in grid))
    x = plot.x_scale(0, max(depth, 1))
    for row, (_, cells) in enumerate(grid):
        for column, cell in enumerate(cells):
            if cell and cell["rate"] is not None:
                left, top = x(column), plot.y0 + 26 * row
                plot.rect(left + 0.5, top + 0.5, x(1) - x(0) - 1, 25, "first", 0.06 + 0.6 * cell["rate"])
                if depth <= NUMBERED:
                    plot.text(left + (x(1) - x(0)) / 2, top + 17, str(cell["count"]), "middle", 11)
    step = max(1, depth // 12)
    plot.x_axis([(x(i + 0.5), str(i)) for i in range(0, depth, step)], "i")
    plot.y_axis([(plot.y0 + 26 * (row + 0.5), label) for row, (label, _) in enumerate(grid)])
    lines = [[label, *(rate(cell) if cell else "" for cell in cells)] for label, cells in grid]
    most = {label: max((cell["count"] for cell in cells if cell), default=0) for label, cells in grid}
    told = ", ".join(f"{label} {count}" for label, count in most.items())
    return Figure(
        name,
        f"{words(direction)}: rows whose suffix becomes the donor's, by what was transplanted; the darker, the more.",
        f"A map of layers against parts. Most rows that follow the donor: {told}.",
        table(f"Rows that follow the donor, {words(direction)}", ["part", *(str(i) for i in range(depth))], lines),
        plot.svg(),
    )
