"""Donor recovery in bidirectional cache transplants, and the frozen interpretation of a replication.

Source: the paper's sections on the transplants and on the replication. A row's four suffixes may be token lists or
digests: they are only compared.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stats.intervals import Z_TRANSPLANT, Proportion, wilson

STRONG = "strong replication"
CONDITIONAL = "conditional replication with an underpowered control stratum"
CHECKPOINT_SENSITIVE = "checkpoint-sensitive recovery"
PROCEDURAL_FAILURE = "procedural-control failure"
UNDERPOWERED = "divergence-underpowered"
# the labels in the order in which `interpret` tries them
PRECEDENCE = (PROCEDURAL_FAILURE, CHECKPOINT_SENSITIVE, UNDERPOWERED, CONDITIONAL, STRONG)
LEAST_DIVERGENT = 12
LEAST_EXACT = 6

INTO_PREFILL, INTO_INCREMENTAL = "incremental_cache_into_prefill", "prefill_cache_into_incremental"
DONORS = {INTO_PREFILL: ("incremental", "prefill"), INTO_INCREMENTAL: ("prefill", "incremental")}  # donor, recipient
SIDES = ("donor", "recipient", "neither")


def follows(suffix: object, donor: object, recipient: object) -> str:
    """Returns whose suffix `suffix` is equal to, a name of `SIDES`; "donor" where both are equal to it."""
    return "donor" if suffix == donor else "recipient" if suffix == recipient else "neither"


class DonorRow(NamedTuple):
    """The suffixes of one row: of the two constructions as built ("native"), and of each with the other's cache."""

    incremental: object
    prefill: object
    incremental_cache_into_prefill: object
    prefill_cache_into_incremental: object

    @property
    def divergent(self) -> bool:
        """Whether the two native suffixes differ."""
        return self.incremental != self.prefill

    @property
    def sides(self) -> dict[str, str]:
        """Whose suffix each recipient has, by direction. On a row that is not divergent "donor" stands for both."""
        suffix = self._asdict()
        return {arm: follows(suffix[arm], suffix[donor], suffix[other]) for arm, (donor, other) in DONORS.items()}

    @property
    def recovers_both(self) -> bool:
        """Whether both recipients have their donor's suffix."""
        return all(side == "donor" for side in self.sides.values())

    @property
    def novel(self) -> bool:
        """Whether a recipient has neither native suffix."""
        return "neither" in self.sides.values()


def donor_endpoints(rows: Sequence[DonorRow]) -> dict[str, Proportion]:
    """Returns the registered endpoints of a transplant panel under the release's names, each with the Wilson interval
    over its eligible rows: recovery among divergent rows, novel trajectories among exact rows.
    """
    divergent = [row for row in rows if row.divergent]
    exact = [row for row in rows if not row.divergent]
    flags = {
        "baseline_divergence": [row.divergent for row in rows],
        **{f"{arm}_donor_recovery": [row.sides[arm] == "donor" for row in divergent] for arm in DONORS},
        "bidirectional_donor_recovery": [row.recovers_both for row in divergent],
        "exact_control_novel_trajectory": [row.novel for row in exact],
    }
    return {name: wilson(sum(found), len(found), Z_TRANSPLANT) for name, found in flags.items()}


def interpret(endpoints: Mapping[str, Proportion]) -> str:
    """Returns the frozen label of a replication from its panel's endpoints: the first of `PRECEDENCE` that holds.

    The paper names five outcomes without ranking them, and more than one can hold. The order here: a novel suffix on an
    exact control comes first, as the transplant itself then changes suffixes and recovery cannot be interpreted.
    Incomplete recovery comes before too few rows: one counterexample is evidence however few rows there are, and its
    absence among few rows is not.
    """
    recovered, novel = endpoints["bidirectional_donor_recovery"], endpoints["exact_control_novel_trajectory"]
    holds = (  # in the order of PRECEDENCE
        novel.count > 0,
        recovered.count < recovered.n,
        recovered.n < LEAST_DIVERGENT,
        novel.n < LEAST_EXACT,
        True,
    )
    return PRECEDENCE[holds.index(True)]
