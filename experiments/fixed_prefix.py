"""Fixed prefixes across precision (paper, experiment 2): the same integer prefixes, incremental against prefill, in
BF16 and in FP32.

The bank holds every BF16 prefix of a finished matrix run, in source order. In each precision every prefix is built
four times: token by token, a bit-exact copy of that, in one call, and in a second, independent call. Prefill against
incremental is the comparison; precision is what is crossed with it.

    python -m experiments.fixed_prefix

runs both precisions over runs/matrix-bf16 into runs/fixed_prefix-bf16-fp32: the preflight rows of both, then all rows
of the first precision, then those of the second. `--dtype` once runs that precision alone, twice two in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from decode.greedy import Steps
from decode.state import State
from experiments.report.values import change, closing_line
from experiments.run.exits import run_command
from experiments.run.experiment import ArmExperiment, Arms, gate, prefix_holds, replica_gate
from experiments.run.inputs import BANK, BankSession, Models, Prefix, bank_tasks, open_bank, open_bank_session
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Panel, Row, RowExtra, Summary
from experiments.run.summary import cross_precision, pair_summary, run_summary
from experiments.run.tasks import Task, longest_continuation
from minimodel.decoder import Decoder
from minimodel.errors import refuse
from minimodel.numerics import DTYPES
from stats.intervals import STREAMS

CONSTRUCTIONS = ("incremental", "prefill")


@dataclass(frozen=True)
class Cell:
    """One ledger row to be."""

    dtype: str
    prefix: Prefix
    state: State  # the prefix replayed
    task: Task

    def key(self) -> str:
        return f"{self.dtype}/{self.prefix.row}"


@dataclass(frozen=True)
class FixedPrefix(ArmExperiment):
    """Builds one prefix four times in one precision and decodes the four suffixes."""

    models: Models  # by dtype
    cells: Sequence[Cell]  # all rows of the first precision, then all of the second

    arms = ("incremental", "incremental_replica", "prefill", "prefill_replica")
    pairs = (("incremental", "incremental_replica"), ("prefill", "prefill_replica"), ("incremental", "prefill"))

    @property
    def longest(self) -> int:
        return longest_continuation([cell.state for cell in self.cells])

    def model(self, index: int) -> Decoder:
        return self.models.at(self.cells[index].dtype)

    def task(self, index: int) -> Task:
        return self.cells[index].task

    def part(self, index: int) -> str:
        return self.cells[index].dtype

    def identity(self, index: int) -> RowExtra:
        return {"dtype": self.cells[index].dtype}

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        model, state = self.model(index), self.cells[index].state
        incremental = yield from incremental_steps(model, state)
        prefill = build_prefill(model, state)
        progress.fed(2 * len(state))
        return incremental, incremental.replica(), prefill, prefill.replica()

    @gate
    def prefix(self, made: Arms) -> bool:
        """The bank's tokens, and what follows from them alone, entered every construction."""
        return prefix_holds(made.all, self.cells[made.index].prefix.tokens)

    replica_incremental = replica_gate("incremental")
    replica_prefill = replica_gate("prefill")

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return fixed_summary(tuple(dict.fromkeys(cell.dtype for cell in self.cells)), rows)

    def closing(self, summary: Summary) -> list[str]:
        """One line per precision, one for the crossing."""
        lines = [closing_line(block) for block in summary["precisions"].values()]
        crossed = summary["cross_precision"]
        if crossed and crossed["rows"]:
            lines.append(
                f"fixed_prefix {crossed['right']} - {crossed['left']}: suffix disagreement "
                f"{change(crossed['suffix_disagreement'])}; "
                f"one prefix in both on {crossed['prefix_identity']['count']}/{crossed['rows']} rows"
            )
        return lines


def fixed_summary(dtypes: tuple[str, ...], rows: Sequence[Row]) -> Summary:
    """Returns the head over all rows, a summary like a matrix's per precision, and their crossing.

    Both precisions must hold one functional state on every row, or the run does not pass. Streams of the paper's plan:
    BF16 100; other dtypes take FP32's 101.
    """
    blocks = {}
    for dtype in dtypes:
        stream = STREAMS["fixed_bf16" if dtype == "bf16" else "fixed_fp32"]
        mine = [row for row in rows if row["dtype"] == dtype]
        blocks[dtype] = run_summary("fixed_prefix", dtype, mine, {**pair_summary(mine, *CONSTRUCTIONS, stream)})
    crossed = cross_precision(rows, *dtypes, arms=CONSTRUCTIONS) if len(dtypes) == 2 else None
    endpoints: Endpoints = {"dtypes": list(dtypes), "precisions": blocks, "cross_precision": crossed}
    summary = run_summary("fixed_prefix", "-".join(dtypes), rows, endpoints)
    fault = crossing_fault(crossed)
    return {**summary, "passed": False, "no_result": fault} if fault else summary


def crossing_fault(crossed: dict[str, Any] | None) -> str:
    """Returns a text where the two precisions were not given one functional state per row; else empty."""
    if crossed is None or not crossed["rows"]:
        return ""
    held = min(crossed[name]["count"] for name in ("prefix_identity", "functional_state_identity"))
    if held == crossed["rows"]:
        return ""
    names = f"{crossed['left']} and {crossed['right']}"
    return f"{names} hold one functional state on {held} of {crossed['rows']} rows only"


def run_fixed(session: BankSession, dtypes: tuple[str, ...], out: Path) -> int:
    """Runs the whole bank in each precision. The preflight is the first rows of each, decoded before all others."""
    options, bank = session.options, session.bank
    states = session.states(bank.prefixes)
    tasks, _, data = bank_tasks(session, bank.prefixes)
    cells = [Cell(d, *row) for d in dtypes for row in zip(bank.prefixes, states, tasks)]
    rows, early = len(states), min(options.preflight, len(states))
    names = [prefix.name() for prefix in bank.prefixes]
    panel: Panel = {"rule": "every prefix of the bank, in source order", "rows": names}
    return run(
        FixedPrefix(session.models, cells),
        session.manifest([cell.key() for cell in cells], panel, data),
        options,
        out,
        preflight=frozenset(first + i for first in range(0, len(cells), rows) for i in range(early)),
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
        numeric = {dtype: options.numeric(dtype) for dtype in dtypes}
        session = open_bank_session("fixed_prefix", options, bank, numeric)
        return run_fixed(session, dtypes, options.directory(f"fixed_prefix-{'-'.join(dtypes)}"))

    run_command(body, "experiments.fixed_prefix")


if __name__ == "__main__":
    main()
