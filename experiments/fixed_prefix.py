"""Fixed prefixes across precision (paper, experiment 2): the same integer prefixes, incremental against prefill, in
BF16 and in FP32.

The bank holds every BF16 prefix of a finished matrix run, in source order. In each precision every prefix is built
four times: token by token, a bit-exact copy of that, in one call, and in a second, independent call. Prefill against
incremental is the comparison; precision is what is crossed with it.

    python -m experiments.fixed_prefix

runs both precisions over runs/matrix-bf16 into runs/fixed_prefix-bf16-fp32: the preflight rows of both, then all rows
of the first precision, then those of the second. `--dtype` once runs that precision alone, twice two in that order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cache.build import build_prefill, incremental_steps
from decode.greedy import Steps
from decode.state import State
from experiments.harness.arms import continued, prefix_holds, replica_exact
from experiments.harness.bank import BANK, Prefix, open_bank
from experiments.harness.bank_session import BankSession, bank_tasks, open_bank_session
from experiments.harness.cross_precision import cross_precision
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, source_option
from experiments.harness.progress import RowProgress
from experiments.harness.rows import row_entry
from experiments.harness.runner import Plan, run_plan
from experiments.harness.summary import pair_summary, run_summary
from experiments.harness.tasks import Task
from experiments.report.closing import closing_line
from experiments.report.values import change
from minimodel.decoder import Decoder
from minimodel.errors import refuse
from minimodel.numerics import DTYPES
from stats.intervals import STREAMS

ARMS = ("incremental", "incremental_replica", "prefill", "prefill_replica")
PAIRS = [("incremental", "incremental_replica"), ("prefill", "prefill_replica"), ("incremental", "prefill")]
GATES = (
    "prefix",
    "replica_incremental",
    "replica_prefill",
    "functional_state",
    "storage_disjoint",
    "copies_synchronised",
    "argmax",
)


@dataclass(frozen=True)
class Cell:
    """One ledger row to be: a prefix of the bank in one precision."""

    dtype: str
    prefix: Prefix
    state: State
    task: Task

    def key(self) -> str:
        return f"{self.dtype}/{self.prefix.row}"


def fixed_row(model: Decoder, cell: Cell, index: int, progress: RowProgress) -> Steps[dict[str, Any]]:
    """Builds one prefix four times and decodes the four suffixes."""
    progress.arm("boundary")
    incremental = yield from incremental_steps(model, cell.state)
    prefill = build_prefill(model, cell.state)
    progress.fed(2 * len(cell.state))
    boundaries = dict(zip(ARMS, (incremental, incremental.replica(), prefill, prefill.replica())))
    arms = yield from continued(model, boundaries, progress)
    gates = {
        "prefix": prefix_holds(arms, cell.prefix.tokens),
        "replica_incremental": replica_exact(arms[0], arms[1]),
        "replica_prefill": replica_exact(arms[2], arms[3]),
    }
    return row_entry(cell.task, index, cell.state, arms, PAIRS, gates, {"dtype": cell.dtype})


def fixed_summary(dtypes: tuple[str, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The head over all rows; `dtypes`; `precisions` {DTYPE: a summary like a matrix's}; `cross_precision`.

    The last is null for one precision. It holds `left`, `right`, `rows`, `prefix_identity` and
    `functional_state_identity` {count, n, rate, wilson_95}, both of which must hold on every row or the run does not
    pass; for suffix, answer, correctness and logits `NAME_disagreement` {n, bf16_count, fp32_count, bf16_only,
    fp32_only, difference_points (fp32 - bf16), bootstrap_95, bootstrap_note, mcnemar_p}; and
    `accuracy_difference_of_differences` {n, difference_points, bootstrap_95, bootstrap_note}. Streams of the paper's
    plan: BF16 100; other dtypes take FP32's 101.
    """
    blocks = {}
    for dtype in dtypes:
        stream = STREAMS["fixed_bf16" if dtype == "bf16" else "fixed_fp32"]
        mine = [row for row in rows if row["dtype"] == dtype]
        blocks[dtype] = run_summary("fixed_prefix", dtype, mine, pair_summary(mine, "incremental", "prefill", stream))
    crossed = cross_precision(rows, *dtypes, arms=("incremental", "prefill")) if len(dtypes) == 2 else None
    endpoints = {"dtypes": list(dtypes), "precisions": blocks, "cross_precision": crossed}
    summary = run_summary("fixed_prefix", "-".join(dtypes), rows, endpoints)
    return {**summary, **crossing_fault(crossed)}


def crossing_fault(crossed: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the summary's verdict where the two precisions were not given one functional state per row; else {}."""
    if crossed is None or not crossed["rows"]:
        return {}
    held = min(crossed[name]["count"] for name in ("prefix_identity", "functional_state_identity"))
    if held == crossed["rows"]:
        return {}
    found = f"{crossed['left']} and {crossed['right']} hold one functional state on {held} of {crossed['rows']} rows"
    return {"passed": False, "no_result": f"{found} only"}


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """The lines for stdout: one per precision, one for the crossing."""
    lines = [closing_line(block) for block in summary["precisions"].values()]
    crossed = summary["cross_precision"]
    if crossed and crossed["rows"]:
        lines.append(
            f"fixed_prefix {crossed['right']} - {crossed['left']}: suffix disagreement "
            f"{change(crossed['suffix_disagreement'])}; "
            f"one prefix in both on {crossed['prefix_identity']['count']}/{crossed['rows']} rows"
        )
    return lines


def fixed_plan(session: BankSession, dtypes: tuple[str, ...]) -> Plan:
    """All rows of the first precision, then all of the second; the preflight is the first rows of each, and is decoded
    before all others."""
    bank = session.bank
    states = session.states(bank.prefixes)
    tasks, _, data = bank_tasks(session, bank.prefixes)
    cells = [Cell(d, *row) for d in dtypes for row in zip(bank.prefixes, states, tasks)]
    rows, early = len(states), min(session.options.preflight, len(states))
    panel = {"rule": "every prefix of the bank, in source order", "rows": [prefix.name() for prefix in bank.prefixes]}
    return Plan(
        manifest=session.manifest([cell.key() for cell in cells], panel, data, tasks=str(session.options.tasks)),
        preflight=frozenset(first + i for first in range(0, len(cells), rows) for i in range(early)),
        gates=GATES,
        task=lambda index: cells[index].task,
        decode=lambda i, progress: fixed_row(session.models.at(cells[i].dtype), cells[i], i, progress),
        model=lambda index: session.models.at(cells[index].dtype),
        longest=session.longest(states),
        batch_size=session.options.batch_size,
        part=lambda index: cells[index].dtype,
        summarise=lambda found: fixed_summary(dtypes, found),
        closing=closing_lines,
        extra=lambda index: {"dtype": cells[index].dtype},
        attachments={BANK: bank.text()},
    )


@click.command(help=__doc__)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=("bf16", "fp32"),
    show_default=True,
    type=click.Choice(list(DTYPES)),
    help="Dtype of weights, K/V and logits; once, or twice for a crossing.",
)
@source_option("bf16 matrix", "matrix-bf16")
@common_options(preflight=2)
def main(options: RunOptions, dtypes: tuple[str, ...], source: Path) -> None:
    def body() -> int:
        if not 1 <= len(dtypes) <= 2 or len(set(dtypes)) != len(dtypes):
            raise refuse("dtype", "one dtype, or two different ones", " ".join(dtypes))
        bank = open_bank(source).first(options.limit)
        plan = fixed_plan(open_bank_session("fixed_prefix", options, dtypes, bank), dtypes)
        return run_plan(plan, options.directory(f"fixed_prefix-{'-'.join(dtypes)}"), options.fresh, options.quiet)

    run_command(body, "experiments.fixed_prefix")


if __name__ == "__main__":
    main()
