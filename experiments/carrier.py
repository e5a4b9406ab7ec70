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

from cache.build import build_prefill, incremental_steps
from cache.isolation import disjoint
from cache.transplant import transplant
from decode.greedy import Steps, suffix_steps
from decode.state import State, token_digest
from experiments.report.values import outcome, rate
from experiments.run.directory import ROWS
from experiments.run.experiment import (
    Arm,
    OneDecoder,
    arm_entry,
    continued,
    copies_synchronised,
    functional_state_holds,
    gate,
    prefix_entry,
    prefix_holds,
    storage_disjoint,
)
from experiments.run.inputs import open_session, open_strata, panel_counts, select_spread
from experiments.run.ledger import sha256_file
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Endpoints, Panel, PanelRow, Row, RowBody, Summary
from experiments.run.summary import run_summary
from minimodel.config import ModelConfig
from minimodel.errors import InputError
from minimodel.roles import ROLE_NAMES
from stats.donors import DONORS, SIDES, follows
from stats.endpoints import first_divergence
from stats.intervals import Z_TRANSPLANT, wilson

RULE = "divergent BF16 rows of the source, evenly spaced order statistics after sorting by (prefix length, row id)"


def sites(config: ModelConfig, state: State) -> dict[str, dict[str, Any]]:
    """Returns the places of a prefix's cache in report order: by name, the arguments of `transplant` that select it."""
    layers, heads = range(config.num_hidden_layers), range(config.num_key_value_heads)
    found: dict[str, dict[str, Any]] = {"whole": {}, "empty": {"layers": ()}}
    found |= {"keys": {"tensors": "k"}, "values": {"tensors": "v"}}
    found |= {f"first_{k}": {"layers": tuple(layers[:k])} for k in layers if k}
    found |= {f"last_{k}": {"layers": tuple(layers[-k:])} for k in layers if k}
    for ending, tensors in (("", "kv"), ("_keys", "k"), ("_values", "v")):
        found |= {f"layer_{i}{ending}": {"layers": (i,), "tensors": tensors} for i in layers}
    for role in sorted(set(state.roles)):
        slots = tuple(slot for slot, held in enumerate(state.roles) if held == role)
        found[f"block_{ROLE_NAMES[role]}"] = {"positions": slots}
    return found | {f"head_{h}": {"heads": (h,)} for h in heads if len(heads) > 1}


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
class Carrier(OneDecoder[Decoded]):
    """Decodes both baselines, then every site in both directions."""

    panel: Panel

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
            for name, site in sites(model.config, state).items():
                progress.arm(f"{direction} {name}")
                mixed = transplant(arms[recipient].boundary, arms[donor].boundary, **site)
                suffix = yield from suffix_steps(model, mixed)
                mine = [Arm(mixed, suffix)]
                made.isolated &= disjoint(mixed.tensors(), *(arm.boundary.tensors() for arm in both))
                made.one_state &= functional_state_holds(mine)
                made.synchronised &= copies_synchronised(mine)
                progress.fed(len(suffix.tokens))
                made.sites[direction][name] = {
                    "follows": follows(suffix.tokens, arms[donor].suffix.tokens, arms[recipient].suffix.tokens),
                    "suffix_sha256": token_digest(suffix.tokens),
                    "leaves_recipient_at": first_divergence(suffix.tokens, arms[recipient].suffix.tokens),
                }
        return made

    @gate
    def prefix(self, made: Decoded) -> bool:
        """The bank's tokens, and what follows from them alone, entered both constructions."""
        return prefix_holds(list(made.arms.values()), self.states[made.index].tokens)

    functional_state = gate(lambda self, made: made.one_state)
    storage_disjoint = gate(lambda self, made: made.isolated)
    copies_synchronised = gate(lambda self, made: made.synchronised)

    @gate
    def divergent(self, made: Decoded) -> bool:
        """The baselines differ here too, as in the run that the row was chosen from."""
        return made.arms["incremental"].suffix.tokens != made.arms["prefill"].suffix.tokens

    @gate
    def empty_follows_recipient(self, made: Decoded) -> bool:
        """A transplant of nothing changes nothing."""
        return all(entries["empty"]["follows"] == "recipient" for entries in made.sites.values())

    def entry(self, index: int, made: Decoded) -> RowBody:
        task = self.task(index)
        return {
            "prefix": prefix_entry(self.states[index]),
            "arms": {name: arm_entry(arm, task) for name, arm in made.arms.items()},
            "comparisons": {},
            "sites": made.sites,
        }

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head, whose trajectory each site follows over the rows that have it, and the fewest layers from
        either end that give the donor's suffix."""
        kept = [row["sites"] for row in rows if "sites" in row]
        directions = list(kept[0]) if kept else []
        counted: dict[str, Any] = {}
        for name in dict.fromkeys(name for sites in kept for places in sites.values() for name in places):
            counted[name] = {}
            for way in directions:
                sides = [sites[way][name]["follows"] for sites in kept if name in sites[way]]
                counts = {side: wilson(sides.count(side), len(sides), Z_TRANSPLANT).as_dict() for side in SIDES}
                counted[name][way] = counts
        smallest = {
            end: {way: [fewest_layers(sites[way], end) for sites in kept] for way in directions}
            for end in ("first", "last")
        }
        endpoints: Endpoints = {"panel": panel_counts(self.panel), "sites": counted, "smallest": smallest}
        return run_summary("carrier", self.decoder.numeric.dtype, rows, endpoints)

    def closing(self, summary: Summary) -> list[str]:
        parts = [outcome(summary)]
        for name in ("whole", "keys", "values"):
            followed = summary["sites"].get(name)
            if followed:
                both = [f"{donor} donor {rate(followed[way]['donor'])}" for way, (donor, _) in DONORS.items()]
                parts.append(f"{name}: {', '.join(both)}")
        return ["; ".join(parts)]


def fewest_layers(places: dict[str, Any], end: str) -> int | None:
    """Returns the smallest k for which the first or last k layers give the donor's suffix; the whole cache counts as
    all layers."""
    layers = sum(name.startswith("layer_") and name.count("_") == 1 for name in places)
    for k in range(1, layers):
        if places[f"{end}_{k}"]["follows"] == "donor":
            return k
    return layers if places["whole"]["follows"] == "donor" else None


@click.command(help=__doc__)
@dtype_option
@click.option("--rows", default=12, show_default=True, type=click.IntRange(min=1), help="Divergent rows to take.")
@source_option("fixed_prefix", "fixed_prefix-bf16-fp32")
@common_options("carrier", tasks=False)
def main(options: RunOptions, dtype: str, rows: int, source: Path) -> int:
    bank, strata = open_strata(source)
    session = open_session("carrier", options, {dtype: options.numeric(dtype)}, bank)
    wanted = rows if options.limit is None else min(rows, options.limit)
    divergent = [prefix for prefix in bank.prefixes if strata[prefix.id] == "divergent"]
    if not divergent:
        raise InputError(f"{source}: expected at least one BF16 row with divergent suffixes, found none")
    chosen = select_spread(divergent, wanted)
    frozen: list[PanelRow] = [{**prefix.name(), "stratum": "divergent"} for prefix in chosen]
    panel = Panel(rule=RULE, wanted={"divergent": wanted}, available={"divergent": len(divergent)}, rows=frozen)
    panel["source_ledger_sha256"] = sha256_file(source / ROWS)
    manifest = session.manifest([prefix.id for prefix in chosen], panel)
    carrier = Carrier(session.models.at(dtype), chosen, session.states(chosen), panel)
    return run(carrier, manifest, options, options.directory(f"carrier-{dtype}"))


if __name__ == "__main__":
    main()
