"""The prospective bridge (paper, experiment 3): is an incremental cache the cache that ordinary decoding retains?

Twelve rows are frozen, evenly spaced over the saved prefix lengths; neither answers nor outcomes are read. Ordinary
greedy decoding first reaches a new live boundary of each. The exact prefix just reached is then consumed one token at a
time. Both boundaries get a bit-exact copy, and all four are continued. Whether the newly reached prefix is the saved
one is told, not asked.

    python -m experiments.bridge --dtype bf16
"""

from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import incremental_steps, live_steps
from decode.greedy import Steps
from decode.state import State
from experiments.harness.arms import continued, replica_exact
from experiments.harness.bank import Bank, Prefix, open_bank
from experiments.harness.bank_session import BankSession, bank_tasks, open_bank_session
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option, source_option
from experiments.harness.panel import panel_counts, shortfall, spread_record
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.runner import Plan, run_plan
from experiments.harness.summary import pair_summary, run_summary
from experiments.harness.tasks import RowName, longest_row
from experiments.report.closing import outcome
from experiments.report.values import rate
from minimodel.decoder import Decoder
from stats.endpoints import first_divergence
from stats.intervals import wilson
from stats.panels import length_spread

WANTED = 12
ARMS = ("live", "live_replica", "incremental", "incremental_replica")
PAIRS = [("live", "live_replica"), ("incremental", "incremental_replica"), ("live", "incremental")]
GATES = (
    "boundary_length",
    "replica_live",
    "replica_incremental",
    "functional_state",
    "storage_disjoint",
    "copies_synchronised",
    "argmax",
)


def select(bank: Bank) -> list[Prefix]:
    """Twelve rows, or all of a smaller bank, from the shortest saved prefix to the longest."""
    lengths = bank.lengths()
    return [bank.prefixes[index] for index in length_spread(lengths, min(WANTED, len(lengths)))]


def bridge_row(
    model: Decoder, saved: Prefix, prompt: State, index: int, progress: RowProgress
) -> Steps[dict[str, Any]]:
    """Reaches a new live boundary, builds the incremental one of its prefix, and decodes the four suffixes."""
    progress.arm("boundary")
    live = yield from live_steps(model, prompt)
    incremental = yield from incremental_steps(model, live.state)
    progress.fed(2 * len(live.state))
    boundaries = dict(zip(ARMS, (live, live.replica(), incremental, incremental.replica())))
    reached = boundary_length(list(boundaries.values()))  # recorded before any suffix is decoded
    arms = yield from continued(model, boundaries, progress)
    gates = {
        "boundary_length": reached == len(live.state) == boundary_length(list(boundaries.values())),
        "replica_live": replica_exact(arms[0], arms[1]),
        "replica_incremental": replica_exact(arms[2], arms[3]),
    }
    extra = {"boundary_length": reached, "saved_prefix": saved_entry(saved, live.state)}
    return row_entry(RowName(saved.row), index, live.state, arms, PAIRS, gates, extra)


def boundary_length(boundaries: list[Boundary]) -> int | None:
    """The tokens that every boundary's cache holds; None where they differ."""
    lengths = {len(boundary.cache) for boundary in boundaries}
    return lengths.pop() if len(lengths) == 1 else None


def saved_entry(saved: Prefix, state: State) -> dict[str, Any]:
    """The row's `saved_prefix`: the bank's prefix beside the newly reached one."""
    return {
        "length": len(saved),
        "sha256": saved.sha256,
        "agrees": saved.tokens == state.tokens,
        "first_divergence": first_divergence(saved.tokens, state.tokens),
    }


def bridge_summary(dtype: str, panel: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The head and the gates (`prefix_length` is of the newly reached prefixes); `panel`; `identity`: rows whose live
    and incremental cache, logits, suffix, and all three are equal in every bit; `saved_prefix_agreement` and
    `saved_prefix_length`; then live against incremental as in a matrix, unscored."""
    kept = [row for row in rows if row["arms"]]
    pairs = [row["comparisons"]["live:incremental"] for row in kept]
    exact = {part: [pair[part]["exact"] for pair in pairs] for part in ("cache", "logits", "suffix")}
    exact["all"] = [all(row) for row in zip(*exact.values())]
    identity = {part: wilson(sum(flags), len(flags)).as_dict() for part, flags in exact.items()}
    saved = [row["saved_prefix"] for row in kept]
    lengths = [entry["length"] for entry in panel["rows"]]
    endpoints = {
        "panel": panel_counts(panel),
        "identity": identity,
        "saved_prefix_agreement": wilson(sum(entry["agrees"] for entry in saved), len(saved)).as_dict(),
        "saved_prefix_length": {"min": min(lengths), "max": max(lengths)},
        **pair_summary(rows, "live", "incremental"),
    }
    return run_summary("bridge", dtype, rows, endpoints)


def closing_lines(summary: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{part} {rate(block)}" for part, block in summary["identity"].items())
    line = f"{outcome(summary)}; live and incremental equal: {parts}"
    return [text for text in (line, shortfall(summary["panel"])) if text]


def bridge_plan(session: BankSession, dtype: str) -> Plan:
    """The frozen rows in selection order; `--limit` keeps the first of them."""
    chosen = select(session.bank)[: session.options.limit]
    _, prompts, data = bank_tasks(session, chosen)
    panel = spread_record(chosen, WANTED, len(session.bank.prefixes))
    model = session.models.at(dtype)
    return Plan(
        manifest=session.manifest([p.row for p in chosen], panel, data, tasks=str(session.options.tasks)),
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: RowName(chosen[index].row),
        decode=lambda i, progress: bridge_row(model, chosen[i], prompts[i], i, progress),
        model=lambda index: model,
        longest=longest_row(session.contract, prompts),
        batch_size=session.options.batch_size,
        summarise=lambda rows: bridge_summary(dtype, panel, rows),
        closing=closing_lines,
    )


@click.command(help=__doc__)
@dtype_option
@source_option("bf16 matrix", "matrix-bf16")
@common_options(preflight=0)
def main(options: RunOptions, dtype: str, source: Path) -> None:
    def body() -> int:
        plan = bridge_plan(open_bank_session("bridge", options, [dtype], open_bank(source)), dtype)
        return run_plan(plan, options.directory(f"bridge-{dtype}"), options.fresh, options.quiet)

    run_command(body, "experiments.bridge")


if __name__ == "__main__":
    main()
