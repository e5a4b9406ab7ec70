"""The prospective bridge (paper, experiment 3): is an incremental cache the cache that ordinary decoding retains?

Twelve rows are frozen, evenly spaced over the saved prefix lengths; neither answers nor outcomes are read. Ordinary
greedy decoding first reaches a new live boundary of each. The exact prefix just reached is then consumed one token at a
time. Both boundaries get a bit-exact copy, and all four are continued. Whether the newly reached prefix is the saved
one is recorded and not a gate.

    python -m experiments.bridge --dtype bf16
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from cache.boundary import Boundary
from cache.build import incremental_steps, live_steps
from decode.greedy import Steps
from decode.state import State
from experiments.report.values import outcome, rate
from experiments.run.exits import run_command
from experiments.run.experiment import ArmExperiment, Arms, boundary_length, gate, replica_gate
from experiments.run.inputs import (
    Prefix,
    bank_tasks,
    open_bank,
    open_bank_session,
    panel_counts,
    panel_span,
    select_spread,
    shortfall,
    spread_record,
)
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Panel, Row, RowExtra, Summary
from experiments.run.summary import pair_summary, run_summary
from experiments.run.tasks import RowName, longest_row
from minimodel.decoder import Decoder
from stats.endpoints import first_divergence
from stats.intervals import wilson

WANTED = 12


@dataclass(frozen=True)
class Bridge(ArmExperiment):
    """Reaches a new live boundary, builds the incremental one of its prefix, and decodes the four suffixes."""

    decoder: Decoder
    saved: Sequence[Prefix]  # the frozen rows' prefixes in the bank
    prompts: Sequence[State]  # of each
    panel: Panel

    arms = ("live", "live_replica", "incremental", "incremental_replica")
    pairs = (("live", "live_replica"), ("incremental", "incremental_replica"), ("live", "incremental"))

    @property
    def longest(self) -> int:
        return longest_row(self.prompts)

    def task(self, index: int) -> RowName:
        return RowName(self.saved[index].row)

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        live = yield from live_steps(self.decoder, self.prompts[index])
        incremental = yield from incremental_steps(self.decoder, live.state)
        progress.fed(2 * len(live.state))
        return live, live.replica(), incremental, incremental.replica()

    @gate
    def boundary_length(self, made: Arms) -> bool:
        """Every boundary's cache holds the whole prefix, before any suffix was decoded and after all."""
        return made.reached == len(made.state) == boundary_length([arm.boundary for arm in made.all])

    replica_live = replica_gate("live")
    replica_incremental = replica_gate("incremental")

    def extra(self, made: Arms) -> RowExtra:
        saved, state = self.saved[made.index], made.state
        return {
            "boundary_length": made.reached,
            "saved_prefix": {
                "length": len(saved),
                "sha256": saved.sha256,
                "agrees": saved.tokens == state.tokens,
                "first_divergence": first_divergence(saved.tokens, state.tokens),
            },
        }

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return bridge_summary(self.decoder.numeric.dtype, self.panel, rows)

    def closing(self, summary: Summary) -> list[str]:
        parts = ", ".join(f"{part} {rate(block)}" for part, block in summary["identity"].items())
        return [f"{outcome(summary)}; live and incremental equal: {parts}", *shortfall(summary["panel"])]


def bridge_summary(dtype: str, panel: Panel, rows: Sequence[Row]) -> Summary:
    """Returns the head (`prefix_length` is of the newly reached prefixes), identity and the saved prefixes, then live
    against incremental as in a matrix, unscored."""
    kept = [row for row in rows if row["arms"]]
    pairs = [row["comparisons"]["live:incremental"] for row in kept]
    exact = {
        "cache": [pair["cache"]["exact"] for pair in pairs],
        "logits": [pair["logits"]["exact"] for pair in pairs],
        "suffix": [pair["suffix"]["exact"] for pair in pairs],
    }
    exact["all"] = [all(row) for row in zip(*exact.values())]
    saved = [row["saved_prefix"] for row in kept]
    endpoints: Endpoints = {
        "panel": panel_counts(panel),
        "identity": {part: wilson(sum(flags), len(flags)).as_dict() for part, flags in exact.items()},
        "saved_prefix_agreement": wilson(sum(entry["agrees"] for entry in saved), len(saved)).as_dict(),
        "saved_prefix_length": panel_span(panel),
        **pair_summary(rows, "live", "incremental"),
    }
    return run_summary("bridge", dtype, rows, endpoints)


@click.command(help=__doc__)
@dtype_option
@source_option("bf16 matrix", "matrix-bf16")
@common_options(preflight=0)
def main(options: RunOptions, dtype: str, source: Path) -> None:
    def body() -> int:
        bank = open_bank(source)
        session = open_bank_session("bridge", options, bank, {dtype: options.numeric(dtype)})
        chosen = select_spread(bank.prefixes, WANTED)[: options.limit]
        _, prompts, data = bank_tasks(session, chosen)
        panel = spread_record(chosen, WANTED, bank)
        bridge = Bridge(session.models.at(dtype), chosen, prompts, panel)
        manifest = session.manifest([prefix.row for prefix in chosen], panel, data)
        return run(bridge, manifest, options, options.directory(f"bridge-{dtype}"))

    run_command(body, "experiments.bridge")


if __name__ == "__main__":
    main()
