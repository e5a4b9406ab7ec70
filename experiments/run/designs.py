"""The designs that several commands share: the retained-live matrix (paper, section 3.3), and whole-cache transplants
in both directions on a fixed prefix (sections 3.6 and 3.7).

The transplants neither read nor recompute expected answers: a row is known by its name, and its arms are not scored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps, live_steps
from cache.transplant import transplant, whole_transplant_holds
from decode.greedy import Steps
from experiments.report.values import closing_line, donor_line
from experiments.run.experiment import ArmExperiment, Arms, OneDecoder, bank_prefix, eligible_choice, gate, replica_gate
from experiments.run.inputs import shortfall
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Row, RowExtra, Summary
from experiments.run.saving import Saving
from experiments.run.summary import pair_summary, run_summary
from stats.donors import DONORS, INTO_INCREMENTAL, INTO_PREFILL, SIDES, DonorRow, donor_endpoints
from stats.intervals import STREAMS, Z_TRANSPLANT, Proportion

NATIVE = ("incremental", "incremental_replica", "prefill", "prefill_replica")


@dataclass(frozen=True)
class RetainedLive(OneDecoder[Arms], ArmExperiment):
    """Generates the boundary once, then decodes four arms."""

    saving: Saving = field(default_factory=Saving)

    arms = ("live", "live_replica", "prefill", "prefill_replica")
    pairs = (("live", "live_replica"), ("prefill", "prefill_replica"), ("live", "prefill"))
    replica_live, replica_prefill = replica_gate("live"), replica_gate("prefill")

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        row, saving = self.tasks[index].id, self.saving
        live = yield from live_steps(self.decoder, self.states[index], observe=saving.observe(row, "live"))
        progress.fed(len(live.state))
        prefill = build_prefill(self.decoder, live.state, observe=saving.observe(row, "prefill"))
        saving.write(row, "live", live)
        saving.write(row, "prefill", prefill)
        # a live boundary's replica is a copy; a prefill's is a second call of the model
        return live, live.replica(), prefill, prefill.replica()

    def extra(self, made: Arms) -> RowExtra:
        return {"prefix_margins": list(made["live"].boundary.margins)}

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return matrix_summary(self.decoder.numeric.dtype, rows)

    def closing(self, summary: Summary) -> list[str]:
        return [closing_line(summary)]

    def notes(self) -> list[str]:
        return self.saving.notes([task.id for task in self.tasks], ("live", "prefill"))


def matrix_summary(dtype: str, rows: Sequence[Row]) -> Summary:
    """Returns the endpoints of live against prefill. Bootstrap streams of the paper's plan: BF16 0, all others 1."""
    stream = STREAMS["matched_bf16" if dtype == "bf16" else "matched_fp32"]
    return run_summary("matrix", dtype, rows, {**pair_summary(rows, "live", "prefill", stream)})


def provenance_gate(name: str) -> Callable[[Any, Any], bool]:
    """Returns the gate that every bit of transplant NAME's K/V is the donor's, and all else the recipient's."""
    arms = (name, *reversed(DONORS[name]))  # the transplant, its recipient, its donor
    return gate(lambda experiment, made: whole_transplant_holds(*(made[arm].boundary for arm in arms)))


@dataclass(frozen=True)
class SixArms(OneDecoder[Arms], ArmExperiment):
    """Builds both constructions twice, transplants both ways, decodes six suffixes."""

    arms = (*NATIVE, INTO_PREFILL, INTO_INCREMENTAL)
    pairs = (
        ("incremental", "incremental_replica"),
        ("prefill", "prefill_replica"),
        ("incremental", "prefill"),
        ("incremental", INTO_PREFILL),  # donor and recipient-with-the-donor's-cache
        ("prefill", INTO_INCREMENTAL),
    )

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        state = self.states[index]
        incremental = yield from incremental_steps(self.decoder, state)
        prefill = build_prefill(self.decoder, state)
        native = (incremental, incremental.replica(), prefill, prefill.replica())
        into_prefill = transplant(recipient=prefill, donor=incremental)
        into_incremental = transplant(recipient=incremental, donor=prefill)
        progress.fed(3 * len(state))
        return (*native, into_prefill, into_incremental)

    prefix = bank_prefix
    replica_incremental, replica_prefill = replica_gate("incremental"), replica_gate("prefill")

    provenance_incremental_cache_into_prefill = provenance_gate(INTO_PREFILL)
    provenance_prefill_cache_into_incremental = provenance_gate(INTO_INCREMENTAL)

    @gate
    def raw_argmax(self, made: Arms) -> bool:
        """All constructions have one argmax over the whole vocabulary and one among eligible tokens.

        A transplant keeps its recipient's logits: only then do both interventions begin with the same first suffix
        token.
        """
        boundaries = [made[name].boundary for name in NATIVE]
        return len({(raw_argmax(one), eligible_choice(one)[0]) for one in boundaries}) == 1

    def extra(self, made: Arms) -> RowExtra:
        donor = donor_row(made.suffixes())  # recovery has a meaning on divergent rows, `novel` on exact ones
        return {
            "raw_argmax": {name: raw_argmax(made[name].boundary) for name in NATIVE},
            "donor": {
                "divergent": donor.divergent,
                **{f"{arm}_recovers": side == "donor" for arm, side in donor.sides.items()},
                "recovers_both": donor.recovers_both,
                "novel": donor.novel,
            },
        }

    def closing(self, summary: Summary) -> list[str]:
        return [donor_line(summary), *shortfall(summary["panel"])]


def raw_argmax(boundary: Boundary) -> int:
    """Returns the argmax of the boundary logits over the whole vocabulary."""
    return int(boundary.logits[0].argmax())


def donor_row(suffixes: Mapping[str, Any]) -> DonorRow:
    """Returns the four suffixes of a row, by arm, that donor recovery is about."""
    return DonorRow(*(suffixes[arm] for arm in DonorRow._fields))


def donor_summary(rows: Sequence[Row]) -> tuple[dict[str, Proportion], Endpoints]:
    """Returns the registered endpoints, and the summary's part that holds them beside incremental against prefill."""
    arms = [row["arms"] for row in rows if row["arms"]]  # all but those that failed closed
    found = [donor_row({name: arm["suffix"] for name, arm in one.items()}) for one in arms]
    endpoints = donor_endpoints(found)
    blocks = {name: rate.as_dict() for name, rate in endpoints.items()}
    registered = {
        "rows": len(found),
        "baseline_divergence": blocks["baseline_divergence"],
        "baseline_exact_rows": endpoints["exact_control_novel_trajectory"].n,
        **blocks,
    }
    sides = {arm: [row.sides[arm] for row in found if row.divergent] for arm in DONORS}
    grid = {arm: {side: followed.count(side) for side in SIDES} for arm, followed in sides.items()}
    return endpoints, {
        **pair_summary(rows, "incremental", "prefill", z=Z_TRANSPLANT),
        "endpoints": registered,
        "grid": grid,
    }
