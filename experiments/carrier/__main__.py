"""Which part of the cache carries the trajectory: partial transplants on divergent rows (beyond the paper).

On rows whose suffixes diverge between incremental and prefill, a part of one construction's K/V is put into the other,
in both directions: keys only, values only, every layer, the first k and the last k layers, each block of the prefix,
each key/value head, and every layer's keys or values alone. Each suffix then follows its donor, its recipient or
neither. The whole cache (must follow the donor, as the paper finds) and the empty transplant (must follow the
recipient) stand beside them.

    python -m experiments.carrier --dtype bf16
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.isolation import disjoint
from cache.transplant import transplant
from decode.greedy import Steps, suffix_steps
from decode.state import State, token_digest
from experiments.carrier.sites import Site, sites
from experiments.carrier.tables import carrier_summary
from experiments.report.values import outcome, rate
from experiments.run.directory import ROWS
from experiments.run.exits import run_command
from experiments.run.experiment import (
    Arm,
    Experiment,
    arm_entry,
    continued,
    copies_synchronised,
    functional_state_holds,
    gate,
    prefix_entry,
    prefix_holds,
    storage_disjoint,
)
from experiments.run.inputs import Prefix, open_bank_session, open_strata, panel_record, select_spread
from experiments.run.ledger import sha256_file
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Gates, Panel, PanelRow, Row, Summary
from experiments.run.tasks import RowName, longest_continuation
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from stats.donors import DONORS, follows
from stats.endpoints import first_divergence

RULE = "divergent BF16 rows of the source, evenly spaced order statistics after sorting by (prefix length, row id)"


@dataclass
class Decoded:
    """One row, decoded site by site: of a mixed boundary only the verdicts and its entry are kept."""

    index: int  # the row's
    arms: dict[str, Arm]  # both baselines
    isolated: bool  # no two boundaries share storage
    one_state: bool  # all arms were given what follows from the integer tokens alone
    synchronised: bool  # the physical copies of all arms agree
    sites: dict[str, Any] = field(default_factory=dict)  # the row's `sites`


@dataclass(frozen=True)
class Carrier(Experiment[Decoded]):
    """Decodes both baselines, then every site in both directions."""

    decoder: Decoder
    prefixes: Sequence[Prefix]  # the frozen rows
    states: Sequence[State]  # of each
    panel: Panel

    @property
    def longest(self) -> int:
        return longest_continuation(self.states)

    def task(self, index: int) -> RowName:
        return RowName(self.prefixes[index].row)

    def decode(self, index: int, progress: RowProgress) -> Steps[Decoded]:
        model, state = self.decoder, self.states[index]
        progress.arm("boundary")
        incremental = yield from incremental_steps(model, state)
        built = {"incremental": incremental, "prefill": build_prefill(model, state)}
        progress.fed(2 * len(state))
        arms = yield from continued(model, built, progress)
        both = list(arms.values())
        made = Decoded(index, arms, storage_disjoint(both), functional_state_holds(both), copies_synchronised(both))
        for direction, (donor, recipient) in DONORS.items():
            made.sites[direction] = {}
            for site in sites(model.config, state):
                progress.arm(f"{direction} {site.name}")
                entry = yield from self._at_site(made, site, arms[donor], arms[recipient], progress)
                made.sites[direction][site.name] = entry
        return made

    def _at_site(
        self, made: Decoded, site: Site, donor: Arm, recipient: Arm, progress: RowProgress
    ) -> Steps[dict[str, Any]]:
        """Puts the donor's cache at `site` into the recipient and continues; returns the site's entry."""
        sources = recipient.boundary, donor.boundary
        mixed: Boundary = transplant(*sources, site.layers, site.tensors, site.positions, site.heads)
        suffix = yield from suffix_steps(self.decoder, mixed)
        arm = Arm(site.name, mixed, suffix)
        made.isolated &= disjoint(mixed.tensors(), *(source.tensors() for source in sources))
        made.one_state &= functional_state_holds([arm])
        made.synchronised &= copies_synchronised([arm])
        progress.fed(len(suffix.tokens))
        return {
            "follows": follows(suffix.tokens, donor.suffix.tokens, recipient.suffix.tokens),
            "suffix_sha256": token_digest(suffix.tokens),
            "leaves_recipient_at": first_divergence(suffix.tokens, recipient.suffix.tokens),
        }

    @gate
    def prefix(self, made: Decoded) -> bool:
        """The bank's tokens, and what follows from them alone, entered both constructions."""
        return prefix_holds(list(made.arms.values()), self.prefixes[made.index].tokens)

    @gate
    def functional_state(self, made: Decoded) -> bool:
        return made.one_state

    @gate
    def storage_disjoint(self, made: Decoded) -> bool:
        return made.isolated

    @gate
    def copies_synchronised(self, made: Decoded) -> bool:
        return made.synchronised

    @gate
    def divergent(self, made: Decoded) -> bool:
        """The baselines differ here too, as in the run that the row was chosen from."""
        return made.arms["incremental"].suffix.tokens != made.arms["prefill"].suffix.tokens

    @gate
    def empty_follows_recipient(self, made: Decoded) -> bool:
        """A transplant of nothing changes nothing."""
        return all(entries["empty"]["follows"] == "recipient" for entries in made.sites.values())

    def entry(self, index: int, made: Decoded, gates: Gates) -> Row:
        task = self.task(index)
        return {
            "row": task.id,
            "index": index,
            "prefix": prefix_entry(self.states[index]),
            "arms": {name: arm_entry(arm, task) for name, arm in made.arms.items()},
            "comparisons": {},
            "sites": made.sites,
            "gates": gates,
            "passed": all(gates.values()),
        }

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return carrier_summary(self.decoder.numeric.dtype, self.panel, rows)

    def closing(self, summary: Summary) -> list[str]:
        parts = [outcome(summary)]
        for name in ("whole", "keys", "values"):
            followed = summary["sites"].get(name)
            if followed:
                both = [f"{donor} donor {rate(followed[way]['donor'])}" for way, (donor, _) in DONORS.items()]
                parts.append(f"{name}: {', '.join(both)}")
        return ["; ".join(parts)]


def divergent_rows(strata: dict[str, str], prefixes: Sequence[Prefix], source: Path) -> list[Prefix]:
    """Returns the rows that diverge in the source. InputError when there is none."""
    found = [prefix for prefix in prefixes if strata[prefix.row] == "divergent"]
    if not found:
        raise InputError(f"{source}: expected at least one BF16 row with divergent suffixes, found none")
    return found


@click.command(help=__doc__)
@dtype_option
@click.option("--rows", default=12, show_default=True, type=click.IntRange(min=1), help="Divergent rows to take.")
@source_option("fixed_prefix", "fixed_prefix-bf16-fp32")
@common_options(preflight=0, tasks=False)
def main(options: RunOptions, dtype: str, rows: int, source: Path) -> None:
    def body() -> int:
        bank, strata = open_strata(source)
        session = open_bank_session("carrier", options, bank, {dtype: options.numeric(dtype)})
        wanted = rows if options.limit is None else min(rows, options.limit)
        divergent = divergent_rows(strata, bank.prefixes, source)
        chosen = select_spread(divergent, wanted)
        states = session.states(chosen)
        named: list[PanelRow] = [{**prefix.name(), "stratum": "divergent"} for prefix in chosen]
        panel = panel_record(RULE, {"divergent": wanted}, {"divergent": len(divergent)}, named)
        panel["source_ledger_sha256"] = sha256_file(source / ROWS)
        manifest = session.manifest([prefix.row for prefix in chosen], panel)
        carrier = Carrier(session.models.at(dtype), chosen, states, panel)
        return run(carrier, manifest, options, options.directory(f"carrier-{dtype}"))

    run_command(body, "experiments.carrier")


if __name__ == "__main__":
    main()
