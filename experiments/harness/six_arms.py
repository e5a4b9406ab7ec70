"""Bidirectional whole-cache transplants on a fixed prefix: the six arms, their gates and endpoints (paper, sections 3.6
and 3.7).

Expected answers are neither read nor recomputed here: a row is known by its name, and its arms are not scored.
"""

from typing import Any

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.transplant import transplant, whole_transplant_holds
from decode.greedy import Steps, choose
from decode.state import State
from experiments.harness.arms import continued, prefix_holds, replica_exact
from experiments.harness.bank import Prefix
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.summary import pair_summary
from experiments.harness.tasks import RowName
from minimodel.decoder import Decoder
from minimodel.roles import MERGE
from stats.donors import DonorEndpoints, DonorRow, donor_endpoints
from stats.intervals import Z_TRANSPLANT

INTO_PREFILL, INTO_INCREMENTAL = "incremental_cache_into_prefill", "prefill_cache_into_incremental"
NATIVE = ("incremental", "incremental_replica", "prefill", "prefill_replica")
ARMS = (*NATIVE, INTO_PREFILL, INTO_INCREMENTAL)
PAIRS = [
    ("incremental", "incremental_replica"),
    ("prefill", "prefill_replica"),
    ("incremental", "prefill"),
    ("incremental", INTO_PREFILL),  # donor and recipient-with-the-donor's-cache
    ("prefill", INTO_INCREMENTAL),
]
GATES = (
    "prefix",
    "replica_incremental",
    "replica_prefill",
    f"provenance_{INTO_PREFILL}",
    f"provenance_{INTO_INCREMENTAL}",
    "raw_argmax",
    "functional_state",
    "storage_disjoint",
    "copies_synchronised",
    "argmax",
)


def six_arm_row(
    model: Decoder, prefix: Prefix, state: State, index: int, progress: RowProgress, stratum: str | None = None
) -> Steps[dict[str, Any]]:
    """Builds both constructions twice, transplants both ways, decodes six suffixes.

    `stratum`: what an earlier run found the row to be, "divergent" or "exact"; `stratum_reproduced` then records
    whether this run's own baselines are that too. It is an endpoint and not a gate.
    """
    progress.arm("boundary")
    incremental = yield from incremental_steps(model, state)
    prefill = build_prefill(model, state)
    native = (incremental, incremental.replica(), prefill, prefill.replica())
    into_prefill = transplant(recipient=prefill, donor=incremental)
    into_incremental = transplant(recipient=incremental, donor=prefill)
    progress.fed(3 * len(state))
    arms = yield from continued(model, dict(zip(ARMS, (*native, into_prefill, into_incremental))), progress)
    first = {name: first_choice(boundary) for name, boundary in zip(NATIVE, native)}
    gates = {
        "prefix": prefix_holds(arms, prefix.tokens),
        "replica_incremental": replica_exact(arms[0], arms[1]),
        "replica_prefill": replica_exact(arms[2], arms[3]),
        f"provenance_{INTO_PREFILL}": whole_transplant_holds(into_prefill, prefill, incremental),
        f"provenance_{INTO_INCREMENTAL}": whole_transplant_holds(into_incremental, incremental, prefill),
        "raw_argmax": len(set(first.values())) == 1,
    }
    donor = _donor_row({arm.name: list(arm.suffix.tokens) for arm in arms})
    raw = {name: choice[0] for name, choice in first.items()}
    extra: dict[str, Any] = {"raw_argmax": raw, "donor": _outcome(donor)}
    if stratum is not None:
        extra["stratum"] = stratum
        extra["stratum_reproduced"] = donor.divergent == (stratum == "divergent")
    return row_entry(RowName(prefix.row), index, state, arms, PAIRS, gates, extra)


def first_choice(boundary: Boundary) -> tuple[int, int]:
    """The argmax of the boundary logits over the whole vocabulary, and the one among eligible tokens.

    A transplant keeps its recipient's logits: only where all constructions have one of each do both interventions
    begin with the same first suffix token.
    """
    eligible = boundary.state.contract.eligible[MERGE].to(boundary.logits.device)
    return int(boundary.logits[0].argmax()), choose(boundary.logits, eligible)[0]


def donor_rows(rows: list[dict[str, Any]]) -> list[DonorRow]:
    """The suffixes of the ledger rows that hold arms: all but those that failed closed."""
    return [_donor_row({name: arm["suffix"] for name, arm in row["arms"].items()}) for row in rows if row["arms"]]


def _donor_row(suffixes: dict[str, list[int]]) -> DonorRow:
    return DonorRow(suffixes["incremental"], suffixes["prefill"], suffixes[INTO_PREFILL], suffixes[INTO_INCREMENTAL])


def _outcome(donor: DonorRow) -> dict[str, bool]:
    """The row's `donor`: recovery means something on divergent rows, `novel` on exact ones."""
    return {
        "divergent": donor.divergent,
        f"{INTO_PREFILL}_recovers": donor.prefill_recipient_follows_donor,
        f"{INTO_INCREMENTAL}_recovers": donor.incremental_recipient_follows_donor,
        "recovers_both": donor.recovers_both,
        "novel": donor.novel,
    }


def donor_summary(rows: list[dict[str, Any]]) -> tuple[DonorEndpoints, dict[str, Any]]:
    """The registered endpoints, and the summary's part that holds them.

    `endpoints`: each {count, n, rate, wilson_95} on its own eligible set. `grid` {ARM: {donor, recipient, neither}}: on
    divergent rows, whose trajectory each transplanted arm continues. The rest compares the two constructions.
    """
    found = donor_rows(rows)
    endpoints = donor_endpoints(found)
    divergent = [row for row in found if row.divergent]
    grid = {
        INTO_PREFILL: _follows(divergent, INTO_PREFILL, "incremental", "prefill"),
        INTO_INCREMENTAL: _follows(divergent, INTO_INCREMENTAL, "prefill", "incremental"),
    }
    pair = pair_summary(rows, "incremental", "prefill", z=Z_TRANSPLANT)
    return endpoints, {**pair, "endpoints": endpoints.as_dict(), "grid": grid}


def _follows(rows: list[DonorRow], arm: str, donor: str, recipient: str) -> dict[str, int]:
    counts = {"donor": 0, "recipient": 0, "neither": 0}
    for row in rows:
        suffix = getattr(row, arm)
        side = "donor" if suffix == getattr(row, donor) else None
        counts[side or ("recipient" if suffix == getattr(row, recipient) else "neither")] += 1
    return counts
