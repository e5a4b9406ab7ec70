"""Outcome-blind transplants on another checkpoint (paper, experiment 5): 48 rows of the same bank, evenly spaced over
prefix length, six arms, and the interpretation that was frozen with the design.

Selection reads lengths and row ids alone. The endpoints are the divergence of the two constructions over all rows,
donor recovery among the divergent ones, and novel trajectories among those that are naturally exact. The bank holds the
prefixes that another checkpoint generated; the demo's `later` checkpoint decodes them here.

    python -m experiments.replication --dtype bf16
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from experiments.run.designs import SixArms, donor_summary
from experiments.run.inputs import SPREAD, open_bank, open_session, panel_counts, select_spread, spread_record
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.records import Endpoints, Panel, Row, Summary
from experiments.run.summary import run_summary
from stats.donors import LEAST_DIVERGENT, LEAST_EXACT, interpret

WANTED = 48


@dataclass(frozen=True)
class Replication(SixArms):
    """The six arms under a checkpoint that may be another than the bank's."""

    panel: Panel
    own_checkpoint: bool  # whether it is the bank's own
    remarks: tuple[str, ...]  # on a checkpoint that is not

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head, the registered endpoints, the two constructions, and the frozen label. The label is None
        where a gate failed, for then nothing may be read from the endpoints."""
        endpoints, block = donor_summary(rows)
        found: Endpoints = {"panel": panel_counts(self.panel), **block}
        summary = run_summary("replication", self.decoder.numeric.dtype, rows, found)
        label = interpret(endpoints) if summary["passed"] else None
        rule = {"least_divergent": LEAST_DIVERGENT, "least_exact": LEAST_EXACT}
        return {
            **summary,
            "own_checkpoint": self.own_checkpoint,
            "interpretation": label,
            "interpretation_rule": rule,
        }

    def closing(self, summary: Summary) -> list[str]:
        line, *short = super().closing(summary)
        return [line, f"interpretation: {summary['interpretation'] or 'none, a gate failed'}", *short]

    def notes(self) -> list[str]:
        return list(self.remarks)


@click.command(help=__doc__)
@dtype_option
@source_option("bf16 matrix", "matrix-bf16")
@common_options("replication", checkpoint="later", tasks=False)
def main(options: RunOptions, dtype: str, source: Path) -> int:
    bank = open_bank(source)
    session = open_session("replication", options, {dtype: options.numeric(dtype)}, bank, same_weights=False)
    chosen = select_spread(bank.prefixes, WANTED)[: options.limit]
    states = session.states(chosen)
    panel = spread_record(SPREAD, chosen, WANTED, len(bank.prefixes))
    manifest = session.manifest([prefix.id for prefix in chosen], panel)
    own = manifest["checkpoint"] == bank.manifest["checkpoint"]
    experiment = Replication(session.models.at(dtype), chosen, states, panel, own, session.notes)
    return run(experiment, manifest, options, options.directory(f"replication-{dtype}"))


if __name__ == "__main__":
    main()
