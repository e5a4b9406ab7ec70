"""The summary of partial transplants."""

from collections.abc import Sequence
from typing import Any

from experiments.run.inputs import panel_counts
from experiments.run.records import Panel, Row, Summary
from experiments.run.summary import run_summary
from stats.donors import SIDES
from stats.intervals import Z_TRANSPLANT, wilson


def carrier_summary(dtype: str, panel: Panel, rows: Sequence[Row]) -> Summary:
    """Returns the head, whose trajectory each site follows over the rows that have it, and the fewest layers from
    either end that give the donor's suffix (the smallest k for which they do; the whole cache counts as all layers).
    """
    kept = [row for row in rows if "sites" in row]
    names = list(dict.fromkeys(name for row in kept for sites in row["sites"].values() for name in sites))
    directions = list(kept[0]["sites"]) if kept else []
    counted = {name: {d: _counts(_sides(kept, d, name)) for d in directions} for name in names}
    ends = ("first", "last")
    smallest = {end: {d: [_smallest(row["sites"][d], end) for row in kept] for d in directions} for end in ends}
    return run_summary("carrier", dtype, rows, {"panel": panel_counts(panel), "sites": counted, "smallest": smallest})


def _sides(rows: Sequence[Row], direction: str, site: str) -> list[str]:
    return [row["sites"][direction][site]["follows"] for row in rows if site in row["sites"][direction]]


def _counts(sides: list[str]) -> dict[str, Any]:
    return {side: wilson(sides.count(side), len(sides), Z_TRANSPLANT).as_dict() for side in SIDES}


def _smallest(sites: dict[str, Any], end: str) -> int | None:
    layers = sum(name.startswith("layer_") and name.count("_") == 1 for name in sites)
    for k in range(1, layers):
        if sites[f"{end}_{k}"]["follows"] == "donor":
            return k
    return layers if sites["whole"]["follows"] == "donor" else None
