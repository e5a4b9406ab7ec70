"""The four published panels, derived again from the matrix's prefix lengths with our selection rules.

The released row ids (r0000 ...) replace problem ids that are withheld, and the published sort ordered rows of equal
length by the withheld ids. So a panel's lengths must be reproduced exactly, and its rows too, except among rows of one
length: there some order of those rows, the same for all four panels, must give the published choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from stats.errors import StatsInputError
from stats.panels import length_spread, spread_positions
from stats.published.tables import WHOLE, Table, read_precisions, read_table

Item = tuple[int, str]  # prefix length, row id
_MOST_TIED = 8  # rows of one length, whose orders are tried


@dataclass(frozen=True)
class PanelCheck:
    """One panel."""

    name: str
    published: tuple[Item, ...]  # in selection order
    derived: tuple[Item, ...]
    ties_explained: bool  # some order of the rows of each length gives the published rows

    @property
    def lengths_equal(self) -> bool:
        """Whether derived and published rows have the same lengths in order."""
        return self.tied == self.differing

    @property
    def differing(self) -> tuple[int, ...]:
        """Returns the selection indices at which the derived row is not the published one."""
        return tuple(i for i, (a, b) in enumerate(zip(self.published, self.derived, strict=True)) if a != b)

    @property
    def tied(self) -> tuple[int, ...]:
        """Returns those of `differing` at which the lengths are equal."""
        return tuple(i for i in self.differing if self.published[i][0] == self.derived[i][0])

    @property
    def passed(self) -> bool:
        """Whether lengths are equal, and rows too, or explained by the withheld order of rows of one length."""
        return self.lengths_equal and (not self.differing or self.ties_explained)


def rederive_panels(data: Path) -> list[PanelCheck]:
    """Derives the bridge (12 rows), both transplant strata (24, 8) and the later panel (48) from the BF16 matrix."""
    matrix = read_precisions(data / "matched_live_prefill.csv")["bf16"]
    primary = read_table(data / "kv_transplant_primary.csv")
    strata = {"divergent": "divergent", "exact": "nondivergent_control"}  # our name: the release's
    if other := set(primary.text("historical_stratum")) - {*strata.values()}:
        expected = f"{primary.name}: expected the strata {' and '.join(strata.values())}"
        raise StatsInputError(f"{expected}, found {', '.join(sorted(other))[:80]!r}")
    bank = _items(matrix)
    panels = {
        "bridge": (bank, _selected(read_table(data / "live_teacher_bridge.csv"), "historical_prefix_token_count")),
        **{
            f"transplant_primary.{name}": (
                _items(matrix.only("suffix_equal", "true" if name == "exact" else "false")),
                _selected(primary.only("historical_stratum", stratum)),
            )
            for name, stratum in strata.items()
        },
        "transplant_later": (bank, _selected(read_table(data / "kv_transplant_later.csv"))),
    }
    explained = all(_some_order(length, list(panels.values())) for length in {length for length, _ in bank})
    return [
        PanelCheck(name, published, tuple(items[i] for i in length_spread(items, len(published))), explained)
        for name, (items, published) in panels.items()
    ]


def _items(table: Table, length: str = "prefix_token_count") -> list[Item]:
    """Returns (prefix length, row id) per row; `length` names the column of lengths."""
    return [*zip(table.read(length, WHOLE), table.text("row_id"), strict=True)]


def _selected(panel: Table, length: str = "prefix_token_count") -> tuple[Item, ...]:
    """Returns the rows of a panel in selection order."""
    ranked = zip(panel.read("selection_index", WHOLE), _items(panel, length), strict=True)
    return tuple(item for _, item in sorted(ranked))


def _some_order(length: int, panels: Sequence[tuple[list[Item], tuple[Item, ...]]]) -> bool:
    """Whether some order of the rows of one `length` makes our rule choose the published rows in all panels at once."""
    demands = []
    for items, published in panels:
        here = {item for item in items if item[0] == length}
        shorter = sum(n < length for n, _ in items)
        ranks = [position - shorter for position in spread_positions(len(items), len(published))]
        ranks = [rank for rank in ranks if 0 <= rank < len(here)]
        demands.append((here, ranks, [item for item in published if item[0] == length]))
    members = sorted(set().union(*(here for here, _, _ in demands)))
    if len(members) > _MOST_TIED:
        raise StatsInputError(
            f"panels: expected at most {_MOST_TIED} rows of one prefix length, found {len(members)} of length {length}"
        )
    return any(
        all(
            [[item for item in order if item in here][rank] for rank in ranks] == wanted
            for here, ranks, wanted in demands
        )
        for order in permutations(members)
    )
