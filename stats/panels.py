"""Selection rules of the panels: evenly spaced order statistics after sorting by prefix length and row id.

Source: the paper's sections on the bridge (12 rows), the transplants (24 + 8 rows in two strata) and the replication
(48 rows). A rule reads lengths, ids and, where it is stratified, the stratum; never an expected answer.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from stats.errors import StatsInputError


def spread_positions(n: int, k: int) -> list[int]:
    """Returns `k` evenly spaced positions of 0..n-1: round(i (n - 1) / (k - 1)), i = 0..k-1, both ends included.

    The quotient is an exact rational; a half rounds to the even position (no published panel has one). k = 1 gives
    the middle position, k = 0 the empty list. Raises StatsInputError where k is negative or greater than n.
    """
    if not 0 <= k <= n:
        raise StatsInputError(f"length spread: expected between 0 and {n} rows to choose, found {k}")
    if k <= 1:
        return [round(Fraction(n - 1, 2))] * k
    return [round(Fraction(i * (n - 1), k - 1)) for i in range(k)]


def length_spread(items: Sequence[tuple[int, str]], k: int) -> list[int]:
    """Returns the indices into `items` (prefix length, row id) of `k` rows spread evenly over the sorted lengths.

    Equal lengths are ordered by row id, as strings.
    """
    order = sorted(range(len(items)), key=items.__getitem__)
    return [order[position] for position in spread_positions(len(items), k)]


def stratified_spread(items: Sequence[tuple[int, str]], strata: Sequence[str], counts: Mapping[str, int]) -> list[int]:
    """Returns the indices of a length spread within each stratum of `counts` {stratum: rows wanted}, in that order.

    `strata` holds each item's stratum. A stratum with fewer rows than wanted gives all of them; the caller reports it.
    """
    chosen = []
    for stratum, wanted in counts.items():
        members = [index for index, name in enumerate(strata) if name == stratum]
        spread = length_spread([items[index] for index in members], min(wanted, len(members)))
        chosen += [members[position] for position in spread]
    return chosen
