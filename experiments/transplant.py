"""Whole-cache transplants on known states (paper, experiment 4): does the trajectory follow the cache?

From the BF16 part of a finished fixed_prefix run, 24 rows whose suffixes diverged and 8 whose suffixes were equal are
frozen, evenly spaced over prefix length within each stratum. Each is built incrementally and by prefill, and every K/V
tensor is replaced by the other construction's, in both directions. Expected answers and correctness are neither read
nor recomputed.

    python -m experiments.transplant --dtype bf16
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from experiments.run.designs import SixArms, donor_summary
from experiments.run.directory import ROWS
from experiments.run.experiment import Arms
from experiments.run.inputs import Bank, Prefix, lengths, open_session, open_strata, panel_counts
from experiments.run.ledger import sha256_file
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.records import Endpoints, Panel, PanelRow, Row, RowExtra, Summary
from experiments.run.summary import run_summary
from stats.intervals import Z_TRANSPLANT, wilson
from stats.panels import stratified_spread

WANTED = {"divergent": 24, "exact": 8}
RULE = "evenly spaced order statistics within each stratum of the BF16 suffixes, sorted by (prefix length, row id)"


def select(bank: Bank, strata: dict[str, str]) -> list[Prefix]:
    """Returns the frozen rows: the divergent stratum first, each from its shortest prefix to its longest."""
    chosen = stratified_spread(lengths(bank.prefixes), [strata[prefix.id] for prefix in bank.prefixes], WANTED)
    return [bank.prefixes[index] for index in chosen]


@dataclass(frozen=True)
class Transplant(SixArms):
    """The six arms of rows whose stratum is known from an earlier run."""

    panel: Panel

    def identity(self, index: int) -> RowExtra:
        return {"stratum": self.panel["rows"][index]["stratum"]}

    def extra(self, made: Arms) -> RowExtra:
        """`stratum_reproduced` is an endpoint and not a gate."""
        extra, place = super().extra(made), self.identity(made.index)
        reproduced = extra["donor"]["divergent"] == (place["stratum"] == "divergent")
        return {**extra, **place, "stratum_reproduced": reproduced}

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head, how many rows of each stratum were reproduced, the registered endpoints, then incremental
        against prefill as in a matrix, unscored."""
        strata = {}
        for stratum in self.panel["wanted"]:
            mine = [row for row in rows if row.get("stratum") == stratum]
            kept = [row["stratum_reproduced"] for row in mine if "stratum_reproduced" in row]
            reproduced = wilson(sum(kept), len(kept), Z_TRANSPLANT).as_dict()
            strata[stratum] = {"rows": len(mine), "reproduced": reproduced}
        endpoints: Endpoints = {"panel": panel_counts(self.panel), "strata": strata, **donor_summary(rows)[1]}
        return run_summary("transplant", self.decoder.numeric.dtype, rows, endpoints)


@click.command(help=__doc__)
@dtype_option
@source_option("fixed_prefix", "fixed_prefix-bf16-fp32")
@common_options("transplant", tasks=False)
def main(options: RunOptions, dtype: str, source: Path) -> int:
    bank, strata = open_strata(source)
    session = open_session("transplant", options, {dtype: options.numeric(dtype)}, bank)
    chosen = select(bank, strata)[: options.limit]
    states = session.states(chosen)
    available = {stratum: list(strata.values()).count(stratum) for stratum in WANTED}
    rows: list[PanelRow] = [{**one.name(), "stratum": strata[one.id]} for one in chosen]
    panel = Panel(rule=RULE, wanted=WANTED, available=available, rows=rows)
    panel["strata_ledger_sha256"] = sha256_file(source / ROWS)
    manifest = session.manifest([prefix.id for prefix in chosen], panel)
    experiment = Transplant(session.models.at(dtype), chosen, states, panel)
    return run(experiment, manifest, options, options.directory(f"transplant-{dtype}"))


if __name__ == "__main__":
    main()
