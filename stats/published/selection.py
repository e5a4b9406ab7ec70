"""The four published panels, derived again from the matrix's prefix lengths with our selection rules.

The released row ids (r0000 ...) replace problem ids that are withheld, and the published sort ordered rows of equal
length by the withheld ids. So a panel's lengths must be reproduced exactly, and its rows too, except among rows of one
length: there some order of those rows, the same for all four panels, must give the published choice.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial
from pathlib import Path

from stats.errors import StatsInputError
from stats.panels import length_spread, spread_positions
from stats.published.matrices import by_precision
from stats.published.tables import Row, read_rows

_MOST_ORDERS = 40_320


@dataclass(frozen=True)
class PanelCheck:
    """One panel."""

    name: str
    published: tuple[tuple[int, str], ...]  # (length, row id) in selection order
    derived: tuple[tuple[int, str], ...]
    ties_explained: bool  # some order of the rows of each length gives the published rows

    @property
    def lengths_equal(self) -> bool:
        return [length for length, _ in self.published] == [length for length, _ in self.derived]

    @property
    def differing(self) -> tuple[int, ...]:
        """Return the selection indices at which the derived row is not the published one."""
        return tuple(i for i, (a, b) in enumerate(zip(self.published, self.derived, strict=True)) if a != b)

    @property
    def rows_equal(self) -> bool:
        return not self.differing

    @property
    def tied(self) -> tuple[int, ...]:
        """Return those of `differing` at which the lengths are equal."""
        return tuple(i for i in self.differing if self.published[i][0] == self.derived[i][0])

    @property
    def passed(self) -> bool:
        """Whether lengths are equal, and rows too, or explained by the withheld order of rows of one length."""
        return self.lengths_equal and (self.rows_equal or self.ties_explained)


def rederive_panels(data: Path) -> list[PanelCheck]:
    """Derive the bridge (12 rows), both transplant strata (24, 8) and the later panel (48) from the BF16 matrix."""
    matrix = by_precision(read_rows(data / "matched_live_prefill.csv", ("precision", "row_id")))["bf16"]
    bank = [(row.whole("prefix_token_count"), row.text("row_id")) for row in matrix]
    exact = {row.text("row_id"): row.flag("suffix_equal") for row in matrix}
    primary = _in_order(read_rows(data / "kv_transplant_primary.csv"))
    strata = {
        name: [row for row in primary if row.text("historical_stratum") == name]
        for name in ("divergent", "nondivergent_control")
    }
    if sum(map(len, strata.values())) != len(primary) or primary != [row for rows in strata.values() for row in rows]:
        raise StatsInputError(
            "kv_transplant_primary.csv: expected the divergent stratum and then the nondivergent_control stratum"
        )
    panels = {
        "bridge": (bank, _panel(read_rows(data / "live_teacher_bridge.csv"), "historical_prefix_token_count")),
        "transplant_primary.divergent": ([item for item in bank if not exact[item[1]]], _panel(strata["divergent"])),
        "transplant_primary.exact": ([item for item in bank if exact[item[1]]], _panel(strata["nondivergent_control"])),
        "transplant_later": (bank, _panel(read_rows(data / "kv_transplant_later.csv"))),
    }
    explained = _ties_explained(list(panels.values()))
    return [
        PanelCheck(name, tuple(published), tuple(items[i] for i in length_spread(items, len(published))), explained)
        for name, (items, published) in panels.items()
    ]


def _in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.whole("selection_index"))


def _panel(rows: Sequence[Row], length: str = "prefix_token_count") -> list[tuple[int, str]]:
    return [(row.whole(length), row.text("row_id")) for row in _in_order(rows)]


def _ties_explained(panels: Sequence[tuple[list[tuple[int, str]], list[tuple[int, str]]]]) -> bool:
    """Whether some order of the rows of each length makes our rule choose the published rows in all panels at once."""
    groups: dict[int, set[str]] = defaultdict(set)
    for items, _ in panels:
        for length, row_id in items:
            groups[length].add(row_id)
    return all(_some_order(length, sorted(members), panels) for length, members in groups.items())


def _some_order(
    length: int, members: list[str], panels: Sequence[tuple[list[tuple[int, str]], list[tuple[int, str]]]]
) -> bool:
    """Whether some order of `members`, the rows of one `length`, gives every panel's published rows of that length."""
    if factorial(len(members)) > _MOST_ORDERS:
        raise StatsInputError(
            f"panels: expected at most 8 rows of one prefix length, found {len(members)} of length {length}"
        )
    demands = []
    for items, published in panels:
        here = {row_id for n, row_id in items if n == length}
        shorter = sum(n < length for n, _ in items)
        ranks = [
            p - shorter for p in spread_positions(len(items), len(published)) if shorter <= p < shorter + len(here)
        ]
        demands.append((here, ranks, [row_id for n, row_id in published if n == length]))
    for order in permutations(members):
        ranked = [([row_id for row_id in order if row_id in here], ranks, wanted) for here, ranks, wanted in demands]
        if all([rows[rank] for rank in ranks] == wanted for rows, ranks, wanted in ranked):
            return True
    return False
