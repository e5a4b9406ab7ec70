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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from decode.greedy import Steps
from experiments.report.values import change, closing_line
from experiments.run.experiment import Crossed, bank_prefix, replica_gate
from experiments.run.inputs import open_bank, open_session
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtypes_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Panel, Row, Summary
from experiments.run.summary import cross_precision, pair_summary, run_summary
from minimodel.errors import refuse
from minimodel.numerics import DTYPES
from stats.intervals import STREAMS

CONSTRUCTIONS = ("incremental", "prefill")


@dataclass(frozen=True)
class FixedPrefix(Crossed):
    """Builds one prefix four times in one precision and decodes the four suffixes."""

    factor = "dtype"
    arms = ("incremental", "incremental_replica", "prefill", "prefill_replica")
    pairs = (("incremental", "incremental_replica"), ("prefill", "prefill_replica"), CONSTRUCTIONS)

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        model, state = self.model(index), self.state(index)
        incremental = yield from incremental_steps(model, state)
        prefill = build_prefill(model, state)
        progress.fed(2 * len(state))
        return incremental, incremental.replica(), prefill, prefill.replica()

    prefix = bank_prefix
    replica_incremental, replica_prefill = replica_gate("incremental"), replica_gate("prefill")

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head over all rows, a summary like a matrix's per precision, and their crossing.

        Both precisions must hold one functional state on every row, or the run does not pass. Streams of the paper's
        plan: BF16 100; other dtypes take FP32's 101.
        """
        dtypes, blocks = list(self.models.numeric), {}
        for dtype in dtypes:
            stream = STREAMS["fixed_bf16" if dtype == "bf16" else "fixed_fp32"]
            mine = [row for row in rows if row["dtype"] == dtype]
            blocks[dtype] = run_summary("fixed_prefix", dtype, mine, {**pair_summary(mine, *CONSTRUCTIONS, stream)})
        crossed = cross_precision(rows, dtypes[0], dtypes[1], CONSTRUCTIONS) if len(dtypes) == 2 else None
        endpoints: Endpoints = {"dtypes": dtypes, "precisions": blocks, "cross_precision": crossed}
        summary = run_summary("fixed_prefix", "-".join(dtypes), rows, endpoints)
        fault = crossing_fault(crossed)
        return {**summary, "passed": False, "no_result": fault} if fault else summary

    def closing(self, summary: Summary) -> list[str]:
        """Returns one line per precision and one for the crossing."""
        lines = [closing_line(block) for block in summary["precisions"].values()]
        crossed = summary["cross_precision"]
        if crossed and crossed["rows"]:
            lines.append(
                f"fixed_prefix {crossed['right']} - {crossed['left']}: suffix disagreement "
                f"{change(crossed['suffix_disagreement'])}; "
                f"one prefix in both on {crossed['prefix_identity']['count']}/{crossed['rows']} rows"
            )
        return lines


def crossing_fault(crossed: dict[str, Any] | None) -> str:
    """Returns a text where the two precisions were not given one functional state per row; else empty."""
    if crossed is None or not crossed["rows"]:
        return ""
    held = crossed["functional_state_identity"]["count"]  # its digest covers the tokens
    if held == crossed["rows"]:
        return ""
    names = f"{crossed['left']} and {crossed['right']}"
    return f"{names} hold one functional state on {held} of {crossed['rows']} rows only"


@click.command(help=__doc__)
@dtypes_option(list(DTYPES), ("bf16", "fp32"), "Dtype of weights, K/V and logits; once, or twice for a crossing.")
@source_option("bf16 matrix", "matrix-bf16")
@common_options("fixed_prefix", preflight=2)
def main(options: RunOptions, dtypes: tuple[str, ...], source: Path) -> int:
    if not 1 <= len(dtypes) <= 2 or len(set(dtypes)) != len(dtypes):
        raise refuse("dtype", "one dtype, or two different ones", " ".join(dtypes))
    bank = open_bank(source)
    bank = replace(bank, prefixes=bank.prefixes[: options.limit])
    session = open_session("fixed_prefix", options, {dtype: options.numeric(dtype) for dtype in dtypes}, bank)
    states = session.states(bank.prefixes)
    tasks, _, data = session.bank_tasks(bank.prefixes)
    panel: Panel = {
        "rule": "every prefix of the bank, in source order",
        "rows": [prefix.name() for prefix in bank.prefixes],
    }
    fixed, rows = FixedPrefix(session.models, tasks, states), len(tasks)
    early = min(options.preflight, rows)  # of each precision, decoded before all other rows
    return run(
        fixed,
        session.manifest(fixed.order(), panel, data),
        options,
        options.directory(f"fixed_prefix-{'-'.join(dtypes)}"),
        preflight=frozenset(start + i for start in range(0, rows * len(dtypes), rows) for i in range(early)),
    )


if __name__ == "__main__":
    main()
