"""Whole-cache transplants on known states (paper, experiment 4): does the trajectory follow the cache?

From the BF16 part of a finished fixed_prefix run, 24 rows whose suffixes diverged and 8 whose suffixes were equal are
frozen, evenly spaced over prefix length within each stratum. Each is built incrementally and by prefill, and every K/V
tensor is replaced by the other construction's, in both directions. Expected answers and correctness are neither read
nor recomputed.

    python -m experiments.transplant --dtype bf16
"""

from pathlib import Path
from typing import Any

import click

from experiments.harness.bank import BANK_DTYPE, Bank, Prefix, copied_bank, open_source
from experiments.harness.bank_session import BankSession, open_bank_session
from experiments.harness.canonical import sha256_file
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option, source_option
from experiments.harness.panel import panel_counts, panel_record, shortfall
from experiments.harness.rundir import ROWS
from experiments.harness.runner import Plan, run_plan
from experiments.harness.six_arms import GATES, donor_summary, six_arm_row
from experiments.harness.summary import run_summary
from experiments.harness.tasks import RowName
from experiments.report.closing import donor_line
from minimodel.errors import InputError
from stats.intervals import Z_TRANSPLANT, wilson
from stats.panels import stratified_spread

WANTED = {"divergent": 24, "exact": 8}
COMMAND = "python -m experiments.fixed_prefix"
RULE = "evenly spaced order statistics within each stratum of the BF16 suffixes, sorted by (prefix length, row id)"


def open_strata(path: Path) -> tuple[Bank, dict[str, str]]:
    """The bank of a finished fixed_prefix run, and each row's stratum: whether its BF16 suffixes were equal."""
    manifest, rows = open_source(path, ("fixed_prefix",), COMMAND)
    bank = copied_bank(path, manifest)
    strata = {
        row["row"]: "exact" if row["comparisons"]["incremental:prefill"]["suffix"]["exact"] else "divergent"
        for row in rows
        if row["dtype"] == BANK_DTYPE
    }
    if list(strata) != [prefix.row for prefix in bank.prefixes]:
        raise InputError(f"{path}: expected {BANK_DTYPE} rows for the whole bank, found {len(strata)}; {COMMAND}")
    return bank, strata


def select(bank: Bank, strata: dict[str, str]) -> list[Prefix]:
    """The frozen rows: the divergent stratum first, each from its shortest prefix to its longest."""
    chosen = stratified_spread(bank.lengths(), [strata[prefix.row] for prefix in bank.prefixes], WANTED)
    return [bank.prefixes[index] for index in chosen]


def transplant_summary(dtype: str, panel: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The head and the gates; `panel` {wanted, available, selected}; `strata` {STRATUM: {rows, reproduced}}, an
    endpoint; `endpoints` and `grid` (see `six_arms.donor_summary`); then incremental against prefill as in a matrix,
    unscored."""
    strata = {}
    for stratum in panel["wanted"]:
        mine = [row for row in rows if row.get("stratum") == stratum]
        kept = [row["stratum_reproduced"] for row in mine if "stratum_reproduced" in row]
        reproduced = wilson(sum(kept), len(kept), Z_TRANSPLANT).as_dict()
        strata[stratum] = {"rows": len(mine), "reproduced": reproduced}
    _, endpoints = donor_summary(rows)
    return run_summary("transplant", dtype, rows, {"panel": panel_counts(panel), "strata": strata, **endpoints})


def transplant_plan(session: BankSession, dtype: str, strata: dict[str, str], ledger_sha256: str) -> Plan:
    """The frozen rows in selection order; `--limit` keeps the first of them."""
    chosen = select(session.bank, strata)[: session.options.limit]
    states = session.states(chosen)
    available = {stratum: list(strata.values()).count(stratum) for stratum in WANTED}
    rows = [{**prefix.name(), "stratum": strata[prefix.row]} for prefix in chosen]
    panel = {**panel_record(RULE, WANTED, available, rows), "strata_ledger_sha256": ledger_sha256}
    model = session.models.at(dtype)
    return Plan(
        manifest=session.manifest([prefix.row for prefix in chosen], panel),
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: RowName(chosen[index].row),
        decode=lambda i, progress: six_arm_row(model, chosen[i], states[i], i, progress, strata[chosen[i].row]),
        model=lambda index: model,
        longest=session.longest(states),
        batch_size=session.options.batch_size,
        summarise=lambda found: transplant_summary(dtype, panel, found),
        closing=lambda summary: [line for line in (donor_line(summary), shortfall(summary["panel"])) if line],
        extra=lambda index: {"stratum": strata[chosen[index].row]},
    )


@click.command(help=__doc__)
@dtype_option
@source_option("fixed_prefix", "fixed_prefix-bf16-fp32")
@common_options(preflight=0, tasks=False)
def main(options: RunOptions, dtype: str, source: Path) -> None:
    def body() -> int:
        bank, strata = open_strata(source)
        session = open_bank_session("transplant", options, [dtype], bank)
        plan = transplant_plan(session, dtype, strata, sha256_file(source / ROWS))
        return run_plan(plan, options.directory(f"transplant-{dtype}"), options.fresh, options.quiet)

    run_command(body, "experiments.transplant")


if __name__ == "__main__":
    main()
