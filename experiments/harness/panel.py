"""A panel: the rows that an experiment froze before it decoded any, and whether as many as its design wants."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.bank import Prefix


def panel_record(
    rule: str, wanted: Mapping[str, int], available: Mapping[str, int], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The manifest's `panel`: how rows were chosen, how many the design wants and the source has, by stratum ("rows"
    where there are no strata), and the chosen rows in order."""
    return {"rule": rule, "wanted": dict(wanted), "available": dict(available), "rows": list(rows)}


def spread_record(chosen: Sequence[Prefix], wanted: int, available: int) -> dict[str, Any]:
    """The panel of an outcome-blind length spread."""
    rule = "evenly spaced order statistics after sorting by (prefix length, row id); no outcome and no answer is read"
    return panel_record(rule, {"rows": wanted}, {"rows": available}, [prefix.name() for prefix in chosen])


def panel_counts(panel: Mapping[str, Any]) -> dict[str, Any]:
    """The summary's `panel`: {wanted, available, selected}, each by stratum."""
    selected = {
        stratum: sum(row.get("stratum", stratum) == stratum for row in panel["rows"]) for stratum in panel["wanted"]
    }
    return {"wanted": panel["wanted"], "available": panel["available"], "selected": selected}


def shortfall(counts: Mapping[str, Any]) -> str:
    """A sentence where a stratum holds fewer rows than the design wants; empty otherwise."""
    short = [
        f"{counts['selected'][stratum]} of {wanted} {stratum}{'' if stratum == 'rows' else ' rows'} "
        f"(the source has {counts['available'][stratum]})"
        for stratum, wanted in counts["wanted"].items()
        if counts["selected"][stratum] < wanted
    ]
    return f"Fewer rows than the design wants: {'; '.join(short)}." if short else ""
