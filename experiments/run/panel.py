"""A panel: the rows that an experiment froze before it decoded any, and whether as many as its design wants."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from experiments.run.bank import Bank, Prefix
from experiments.run.records import Panel, PanelRow
from stats.panels import length_spread

SPREAD = "evenly spaced order statistics after sorting by (prefix length, row id); no outcome and no answer is read"


class Sized(Protocol):
    """A row to choose from."""

    @property
    def row(self) -> str: ...  # its id
    def __len__(self) -> int: ...  # its tokens


Item = TypeVar("Item", bound=Sized)


def select_spread(items: Sequence[Item], wanted: int) -> list[Item]:
    """Returns `wanted` rows, or all where there are fewer, evenly spaced from the shortest to the longest."""
    return [items[index] for index in length_spread(lengths(items), min(wanted, len(items)))]


def lengths(items: Sequence[Sized]) -> list[tuple[int, str]]:
    """Returns (length, row id) of each: all that the outcome-blind selections read."""
    return [(len(item), item.row) for item in items]


def panel_record(rule: str, wanted: Mapping[str, int], available: Mapping[str, int], rows: Sequence[PanelRow]) -> Panel:
    """Returns the manifest's `panel`."""
    return {"rule": rule, "wanted": dict(wanted), "available": dict(available), "rows": list(rows)}


def spread_record(chosen: Sequence[Prefix], wanted: int, bank: Bank) -> Panel:
    """Returns the panel of an outcome-blind length spread over the whole bank."""
    return panel_record(SPREAD, {"rows": wanted}, {"rows": len(bank.prefixes)}, [prefix.name() for prefix in chosen])


def panel_counts(panel: Panel) -> dict[str, dict[str, int]]:
    """Returns the summary's `panel`: wanted, available and selected rows, each by stratum."""
    selected = {
        stratum: sum(row.get("stratum", stratum) == stratum for row in panel["rows"]) for stratum in panel["wanted"]
    }
    return {"wanted": panel["wanted"], "available": panel["available"], "selected": selected}


def panel_span(panel: Panel) -> dict[str, int]:
    """Returns {min, max} of the chosen rows' lengths."""
    found = [row["length"] for row in panel["rows"]]
    return {"min": min(found), "max": max(found)}


def shortfall(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a sentence where a stratum holds fewer rows than the design wants; none otherwise."""
    short = [
        f"{counts['selected'][stratum]} of {wanted} {stratum}{'' if stratum == 'rows' else ' rows'} "
        f"(the source has {counts['available'][stratum]})"
        for stratum, wanted in counts["wanted"].items()
        if counts["selected"][stratum] < wanted
    ]
    return [f"Fewer rows than the design wants: {'; '.join(short)}."] if short else []
