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
from experiments.report.values import outcome, rate
from experiments.run import inputs
from experiments.run.experiment import ArmExperiment, Arms, OneDecoder, gate, replica_gate
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Panel, Row, RowExtra, Summary
from experiments.run.summary import pair_summary, run_summary
from experiments.run.tasks import Prefix
from stats.endpoints import first_divergence
from stats.intervals import wilson

WANTED = 12


@dataclass(frozen=True)
class Bridge(OneDecoder[Arms], ArmExperiment):
    """Reaches a new live boundary, builds the incremental one of its prefix, and decodes the four suffixes."""

    tasks: Sequence[Prefix]  # the frozen prefixes of the bank; each row starts from the prompt of its prefix
    panel: Panel

    arms = ("live", "live_replica", "incremental", "incremental_replica")
    pairs = (("live", "live_replica"), ("incremental", "incremental_replica"), ("live", "incremental"))

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        live = yield from live_steps(self.decoder, self.states[index])
        incremental = yield from incremental_steps(self.decoder, live.state)
        progress.fed(2 * len(live.state))
        return live, live.replica(), incremental, incremental.replica()

    @gate
    def boundary_length(self, made: Arms) -> bool:
        """Every boundary's cache still holds the prefix and no more, after all suffixes were decoded."""
        return cache_length(made) == len(made.state)

    replica_live = replica_gate("live")
    replica_incremental = replica_gate("incremental")

    def extra(self, made: Arms) -> RowExtra:
        saved, state = self.tasks[made.index], made.state
        return {
            "boundary_length": cache_length(made),
            "saved_prefix": {
                "length": len(saved),
                "sha256": saved.sha256,
                "agrees": saved.tokens == state.tokens,
                "first_divergence": first_divergence(saved.tokens, state.tokens),
            },
        }

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head (`prefix_length` is of the newly reached prefixes), identity and the saved prefixes, then
        live against incremental as in a matrix, unscored."""
        kept = [row for row in rows if row["arms"]]
        pairs = [row["comparisons"]["live:incremental"] for row in kept]
        exact = {
            "cache": [pair["cache"]["exact"] for pair in pairs],
            "logits": [pair["logits"]["exact"] for pair in pairs],
            "suffix": [pair["suffix"]["exact"] for pair in pairs],
        }
        exact["all"] = [all(row) for row in zip(*exact.values())]
        agrees = [row["saved_prefix"]["agrees"] for row in kept]
        endpoints: Endpoints = {
            "panel": inputs.panel_counts(self.panel),
            "identity": {part: wilson(sum(flags), len(flags)).as_dict() for part, flags in exact.items()},
            "saved_prefix_agreement": wilson(sum(agrees), len(agrees)).as_dict(),
            "saved_prefix_length": inputs.panel_span(self.panel),
            **pair_summary(rows, "live", "incremental"),
        }
        return run_summary("bridge", self.decoder.numeric.dtype, rows, endpoints)

    def closing(self, summary: Summary) -> list[str]:
        parts = ", ".join(f"{part} {rate(block)}" for part, block in summary["identity"].items())
        return [f"{outcome(summary)}; live and incremental equal: {parts}", *inputs.shortfall(summary["panel"])]


def cache_length(made: Arms) -> int | None:
    """Returns the tokens that every boundary's cache holds; None where they differ."""
    lengths = {len(arm.boundary.cache) for arm in made.all}
    return lengths.pop() if len(lengths) == 1 else None


@click.command(help=__doc__)
@dtype_option
@source_option("bf16 matrix", "matrix-bf16")
@common_options("bridge")
def main(options: RunOptions, dtype: str, source: Path) -> int:
    bank = inputs.open_bank(source)
    session = inputs.open_session("bridge", options, {dtype: options.numeric(dtype)}, bank)
    chosen = inputs.select_spread(bank.prefixes, WANTED)[: options.limit]
    _, prompts, data = session.bank_tasks(chosen)
    panel = inputs.spread_record(inputs.SPREAD, chosen, WANTED, len(bank.prefixes))
    manifest = session.manifest([prefix.id for prefix in chosen], panel, data)
    bridge = Bridge(session.models.at(dtype), chosen, prompts, panel)
    return run(bridge, manifest, options, options.directory(f"bridge-{dtype}"))


if __name__ == "__main__":
    main()
