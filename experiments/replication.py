"""Outcome-blind transplants on another checkpoint (paper, experiment 5): 48 rows of the same bank, evenly spaced over
prefix length, six arms, and the interpretation that was frozen with the design.

Selection reads lengths and row ids alone. The endpoints are the divergence of the two constructions over all rows,
donor recovery among the divergent ones, and novel trajectories among those that are naturally exact. The bank holds the
prefixes of its own checkpoint; the demo's `later` checkpoint decodes them here.

    python -m experiments.replication --dtype bf16
"""

from pathlib import Path
from typing import Any

import click

from experiments.harness.bank import Bank, Prefix, open_bank
from experiments.harness.bank_session import BankSession, open_bank_session
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option, source_option
from experiments.harness.panel import panel_counts, shortfall, spread_record
from experiments.harness.runner import Plan, run_plan
from experiments.harness.six_arms import GATES, donor_summary, six_arm_row
from experiments.harness.summary import run_summary
from experiments.harness.tasks import RowName
from experiments.report.closing import donor_line
from stats.donors import LEAST_DIVERGENT, LEAST_EXACT, interpret
from stats.panels import length_spread

WANTED = 48


def select(bank: Bank) -> list[Prefix]:
    """48 rows, or all of a smaller bank, from the shortest prefix to the longest."""
    lengths = bank.lengths()
    return [bank.prefixes[index] for index in length_spread(lengths, min(WANTED, len(lengths)))]


def replication_summary(
    dtype: str, panel: dict[str, Any], own_checkpoint: bool, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The head and the gates; `panel`; `own_checkpoint`: whether the bank's own checkpoint was decoded; `endpoints`,
    `grid`, the two constructions; `interpretation`: the frozen label, null where a gate failed, for then nothing may
    be read from the endpoints."""
    endpoints, block = donor_summary(rows)
    summary = run_summary("replication", dtype, rows, {"panel": panel_counts(panel), **block})
    label = interpret(endpoints) if summary["passed"] else None
    rule = {"least_divergent": LEAST_DIVERGENT, "least_exact": LEAST_EXACT}
    return {**summary, "own_checkpoint": own_checkpoint, "interpretation": label, "interpretation_rule": rule}


def closing_lines(summary: dict[str, Any]) -> list[str]:
    label = f"interpretation: {summary['interpretation'] or 'none, a gate failed'}"
    return [line for line in (donor_line(summary), label, shortfall(summary["panel"])) if line]


def replication_plan(session: BankSession, dtype: str) -> Plan:
    """The frozen rows in selection order; `--limit` keeps the first of them."""
    chosen = select(session.bank)[: session.options.limit]
    states = session.states(chosen)
    panel = spread_record(chosen, WANTED, len(session.bank.prefixes))
    manifest = session.manifest([prefix.row for prefix in chosen], panel)
    own = manifest["checkpoint"] == session.bank.manifest["checkpoint"]
    model = session.models.at(dtype)
    return Plan(
        manifest=manifest,
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: RowName(chosen[index].row),
        decode=lambda i, progress: six_arm_row(model, chosen[i], states[i], i, progress),
        model=lambda index: model,
        longest=session.longest(states),
        batch_size=session.options.batch_size,
        summarise=lambda rows: replication_summary(dtype, panel, own, rows),
        closing=closing_lines,
        notes=lambda: list(session.notes),
    )


@click.command(help=__doc__)
@dtype_option
@source_option("bf16 matrix", "matrix-bf16")
@common_options(preflight=0, checkpoint="later", tasks=False)
def main(options: RunOptions, dtype: str, source: Path) -> None:
    def body() -> int:
        session = open_bank_session("replication", options, [dtype], open_bank(source), same_weights=False)
        plan = replication_plan(session, dtype)
        return run_plan(plan, options.directory(f"replication-{dtype}"), options.fresh, options.quiet)

    run_command(body, "experiments.replication")


if __name__ == "__main__":
    main()
