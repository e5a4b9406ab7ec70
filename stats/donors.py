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
    """Return whose trajectory a suffix repeats from the boundary to the end, a name of `SIDES`."""
    return "donor" if suffix == donor else "recipient" if suffix == recipient else "neither"


class DonorRow(NamedTuple):
    """The suffixes of one row: the two native constructions, and each recipient after it took the other's whole
    cache.
    """

    incremental: object
    prefill: object
    incremental_cache_into_prefill: object
    prefill_cache_into_incremental: object

    @property
    def divergent(self) -> bool:
        return self.incremental != self.prefill

    @property
    def sides(self) -> dict[str, str]:
        """Return {direction: name of `SIDES`}. On an exact row the native trajectories are one, the donor's."""
        suffix = self._asdict()
        return {arm: follows(suffix[arm], suffix[donor], suffix[other]) for arm, (donor, other) in DONORS.items()}

    @property
    def recovers_both(self) -> bool:
        return all(side == "donor" for side in self.sides.values())

    @property
    def novel(self) -> bool:
        """Whether a recipient follows neither native trajectory."""
        return "neither" in self.sides.values()


def donor_endpoints(rows: Sequence[DonorRow]) -> dict[str, Proportion]:
    """Return the registered endpoints of a transplant panel under the release's names, each with the Wilson interval
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
    """Return the frozen label of a replication from its panel's endpoints.

    The paper names five outcomes without ranking them; more than one can hold. `PRECEDENCE` is the order here. A novel
    trajectory on an exact control comes first: the intervention itself then changes trajectories, so recovery cannot be
    interpreted. One unrecovered row refutes complete recovery, however few rows there are. Failures come before lack of
    power, because one counterexample is evidence and its absence among few rows is not.
    """
    recovered, novel = endpoints["bidirectional_donor_recovery"], endpoints["exact_control_novel_trajectory"]
    holds = (
        novel.count > 0,
        recovered.count < recovered.n,
        recovered.n < LEAST_DIVERGENT,
        novel.n < LEAST_EXACT,
        True,
    )
    return PRECEDENCE[holds.index(True)]
