"""Donor recovery in bidirectional cache transplants, and the frozen interpretation of a replication.

Source: the paper's sections on the transplants and on the replication. A row's four suffixes may be token lists or
digests: they are only compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stats.intervals import Z_TRANSPLANT, Proportion, wilson

STRONG = "strong replication"
CONDITIONAL = "conditional replication with an underpowered control stratum"
CHECKPOINT_SENSITIVE = "checkpoint-sensitive recovery"
PROCEDURAL_FAILURE = "procedural-control failure"
UNDERPOWERED = "divergence-underpowered"

PRECEDENCE = (PROCEDURAL_FAILURE, CHECKPOINT_SENSITIVE, UNDERPOWERED, CONDITIONAL, STRONG)
"""The labels in the order in which `interpretation` tries them."""

LEAST_DIVERGENT = 12
LEAST_EXACT = 6


@dataclass(frozen=True)
class DonorRow:
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
    def prefill_recipient_follows_donor(self) -> bool:
        return self.incremental_cache_into_prefill == self.incremental

    @property
    def incremental_recipient_follows_donor(self) -> bool:
        return self.prefill_cache_into_incremental == self.prefill

    @property
    def recovers_both(self) -> bool:
        return self.prefill_recipient_follows_donor and self.incremental_recipient_follows_donor

    @property
    def novel(self) -> bool:
        """Whether a recipient follows neither native trajectory (on an exact row the two are one)."""
        native = (self.incremental, self.prefill)
        return self.incremental_cache_into_prefill not in native or self.prefill_cache_into_incremental not in native


@dataclass(frozen=True)
class DonorEndpoints:
    """The registered endpoints: recovery among divergent rows, novel trajectories among exact rows."""

    rows: int
    baseline_divergence: Proportion
    incremental_cache_into_prefill: Proportion
    prefill_cache_into_incremental: Proportion
    bidirectional: Proportion
    exact_control_novel: Proportion

    @property
    def exact_rows(self) -> int:
        return self.exact_control_novel.n

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form under the release's endpoint names."""
        return {
            "rows": self.rows,
            "baseline_divergence": self.baseline_divergence.as_dict(),
            "baseline_exact_rows": self.exact_rows,
            "incremental_cache_into_prefill_donor_recovery": self.incremental_cache_into_prefill.as_dict(),
            "prefill_cache_into_incremental_donor_recovery": self.prefill_cache_into_incremental.as_dict(),
            "bidirectional_donor_recovery": self.bidirectional.as_dict(),
            "exact_control_novel_trajectory": self.exact_control_novel.as_dict(),
        }


def donor_endpoints(rows: Sequence[DonorRow], z: float = Z_TRANSPLANT) -> DonorEndpoints:
    """Return the endpoints of a transplant panel, each with the Wilson interval over its eligible rows."""
    divergent = [row for row in rows if row.divergent]
    exact = [row for row in rows if not row.divergent]
    n = len(divergent)
    return DonorEndpoints(
        rows=len(rows),
        baseline_divergence=wilson(n, len(rows), z),
        incremental_cache_into_prefill=wilson(sum(row.prefill_recipient_follows_donor for row in divergent), n, z),
        prefill_cache_into_incremental=wilson(sum(row.incremental_recipient_follows_donor for row in divergent), n, z),
        bidirectional=wilson(sum(row.recovers_both for row in divergent), n, z),
        exact_control_novel=wilson(sum(row.novel for row in exact), len(exact), z),
    )


def interpretation(divergent: int, exact: int, recovered: int, novel: int) -> str:
    """Return the frozen label of a replication, from counts of rows.

    divergent, exact: rows of each stratum. recovered: divergent rows that follow the donor in both directions. novel:
    exact rows with a novel trajectory.

    The paper names five outcomes without ranking them; more than one can hold. The order here:

    1. any novel trajectory on an exact control: procedural-control failure. The intervention itself then changes
       trajectories, so recovery cannot be interpreted;
    2. any unrecovered divergent row: checkpoint-sensitive recovery. One failure refutes complete recovery, however few
       rows there are;
    3. fewer than 12 divergent rows: divergence-underpowered;
    4. fewer than 6 exact rows: conditional replication with an underpowered control stratum;
    5. otherwise: strong replication.

    Failures are checked before lack of power, because one counterexample is evidence and its absence among few rows is
    not. A later label implies that the conditions of the earlier ones were false.
    """
    assert 0 <= recovered <= divergent and 0 <= novel <= exact, (
        "counts of a panel: recovered of divergent, novel of exact"
    )
    if novel > 0:
        return PROCEDURAL_FAILURE
    if recovered < divergent:
        return CHECKPOINT_SENSITIVE
    if divergent < LEAST_DIVERGENT:
        return UNDERPOWERED
    return STRONG if exact >= LEAST_EXACT else CONDITIONAL


def interpret(endpoints: DonorEndpoints) -> str:
    """Return the `interpretation` of a panel's endpoints."""
    return interpretation(
        divergent=endpoints.baseline_divergence.count,
        exact=endpoints.exact_rows,
        recovered=endpoints.bidirectional.count,
        novel=endpoints.exact_control_novel.count,
    )
