"""Which part of the cache carries the trajectory: partial transplants on divergent rows (beyond the paper).

On rows whose suffixes diverge between incremental and prefill, a part of one construction's K/V is put into the other,
in both directions: keys only, values only, every layer, the first k and the last k layers, each block of the prefix,
each key/value head, and every layer's keys or values alone. Each suffix then follows its donor, its recipient or
neither. The whole cache (must follow the donor, as the paper finds) and the empty transplant (must follow the
recipient) stand beside them.

    python -m experiments.carrier --dtype bf16
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.isolation import disjoint
from cache.transplant import transplant
from decode.greedy import Steps, Suffix, suffix_steps
from decode.state import State, token_digest
from experiments.carrier.sites import Site, sites
from experiments.carrier.tables import carrier_summary
from experiments.harness.arms import Arm, copies_synchronised, functional_state_holds, prefix_holds, storage_disjoint
from experiments.harness.bank import Prefix
from experiments.harness.bank_session import BankSession, open_bank_session
from experiments.harness.canonical import sha256_file
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option, source_option
from experiments.harness.panel import panel_record
from experiments.harness.progress import RowProgress
from experiments.harness.rows import arm_entry, prefix_entry
from experiments.harness.rundir import ROWS
from experiments.harness.runner import Plan, run_plan
from experiments.harness.tasks import RowName
from experiments.report.closing import outcome
from experiments.report.values import rate
from experiments.transplant import open_strata
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from stats.endpoints import first_divergence
from stats.panels import length_spread

DIRECTIONS = ("incremental_cache_into_prefill", "prefill_cache_into_incremental")
GATES = (
    "prefix",
    "functional_state",
    "storage_disjoint",
    "copies_synchronised",
    "divergent",
    "empty_follows_recipient",
)
RULE = "divergent BF16 rows of the source, evenly spaced order statistics after sorting by (prefix length, row id)"


def follows(suffix: Suffix, donor: Suffix, recipient: Suffix) -> str:
    """Whose tokens the suffix repeats from the boundary to the end: "donor", "recipient" or "neither"."""
    if suffix.tokens == donor.tokens:
        return "donor"
    return "recipient" if suffix.tokens == recipient.tokens else "neither"


def carrier_row(
    model: Decoder, prefix: Prefix, state: State, index: int, progress: RowProgress
) -> Steps[dict[str, Any]]:
    """Both baselines, then every site in both directions."""
    progress.arm("boundary")
    incremental = yield from incremental_steps(model, state)
    built = {"incremental": incremental, "prefill": build_prefill(model, state)}
    progress.fed(2 * len(state))
    native = {}
    for name, boundary in built.items():
        progress.arm(name)
        native[name] = yield from suffix_steps(model, boundary)
    entries: dict[str, Any] = {}
    arms = [Arm(name, built[name], native[name]) for name in built]
    isolated, one_state, together = storage_disjoint(arms), functional_state_holds(arms), copies_synchronised(arms)
    for direction in DIRECTIONS:
        donor, recipient = direction.split("_cache_into_")
        entries[direction] = {}
        for site in sites(model.config, state):
            progress.arm(f"{direction} {site.name}")
            mixed, suffix = yield from _at_site(model, built[donor], built[recipient], site)
            isolated = isolated and disjoint(mixed.tensors(), built[donor].tensors(), built[recipient].tensors())
            changed = [Arm(site.name, mixed, suffix)]
            one_state, together = (
                one_state and functional_state_holds(changed),
                together and copies_synchronised(changed),
            )
            progress.fed(len(suffix.tokens))
            entries[direction][site.name] = {
                "follows": follows(suffix, native[donor], native[recipient]),
                "suffix_sha256": token_digest(suffix.tokens),
                "leaves_recipient_at": first_divergence(suffix.tokens, native[recipient].tokens),
            }
    gates = {
        "prefix": prefix_holds(arms, prefix.tokens),
        "functional_state": one_state,
        "storage_disjoint": isolated,
        "copies_synchronised": together,
        "divergent": native["incremental"].tokens != native["prefill"].tokens,
        "empty_follows_recipient": all(entries[d]["empty"]["follows"] == "recipient" for d in DIRECTIONS),
    }
    return {
        "row": prefix.row,
        "index": index,
        "prefix": prefix_entry(state),
        "arms": {arm.name: arm_entry(arm, RowName(prefix.row)) for arm in arms},
        "comparisons": {},
        "sites": entries,
        "gates": gates,
        "passed": all(gates.values()),
    }


def _at_site(model: Decoder, donor: Boundary, recipient: Boundary, site: Site) -> Steps[tuple[Boundary, Suffix]]:
    mixed = transplant(recipient, donor, site.layers, site.tensors, site.positions, site.heads)
    suffix = yield from suffix_steps(model, mixed)
    return mixed, suffix


def select(strata: dict[str, str], prefixes: Sequence[Prefix], wanted: int, source: Path) -> list[Prefix]:
    """`wanted` divergent rows, fewer where there are fewer. InputError when there is none."""
    divergent = [prefix for prefix in prefixes if strata[prefix.row] == "divergent"]
    if not divergent:
        raise InputError(f"{source}: expected at least one BF16 row with divergent suffixes, found none")
    chosen = length_spread([(len(p), p.row) for p in divergent], min(wanted, len(divergent)))
    return [divergent[i] for i in chosen]


def carrier_plan(session: BankSession, dtype: str, strata: dict[str, str], wanted: int, ledger: str) -> Plan:
    """Freezes the rows; nothing is decoded yet."""
    chosen = select(strata, session.bank.prefixes, wanted, session.bank.source)
    states = session.states(chosen)
    available = {"divergent": sum(stratum == "divergent" for stratum in strata.values())}
    panel = panel_record(RULE, {"divergent": wanted}, available, [{**p.name(), "stratum": "divergent"} for p in chosen])
    return Plan(
        manifest=session.manifest([p.row for p in chosen], {**panel, "source_ledger_sha256": ledger}),
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: RowName(chosen[index].row),
        decode=lambda i, progress: carrier_row(session.models.at(dtype), chosen[i], states[i], i, progress),
        model=lambda index: session.models.at(dtype),
        longest=session.longest(states),
        batch_size=session.options.batch_size,
        summarise=lambda rows: carrier_summary(dtype, panel, rows),
        closing=_closing,
    )


def _closing(summary: dict[str, Any]) -> list[str]:
    parts = [outcome(summary)]
    for name in ("whole", "keys", "values"):
        followed = summary["sites"].get(name)
        if followed:
            both = [f"{direction.split('_')[0]} donor {rate(followed[direction]['donor'])}" for direction in DIRECTIONS]
            parts.append(f"{name}: {', '.join(both)}")
    return ["; ".join(parts)]


@click.command(help=__doc__)
@dtype_option
@click.option("--rows", default=12, show_default=True, type=click.IntRange(min=1), help="Divergent rows to take.")
@source_option("fixed_prefix", "fixed_prefix-bf16-fp32")
@common_options(preflight=0, tasks=False)
def main(options: RunOptions, dtype: str, rows: int, source: Path) -> None:
    def body() -> int:
        bank, strata = open_strata(source)
        session = open_bank_session("carrier", options, [dtype], bank)
        wanted = rows if options.limit is None else min(rows, options.limit)
        plan = carrier_plan(session, dtype, strata, wanted, sha256_file(source / ROWS))
        return run_plan(plan, options.directory(f"carrier-{dtype}"), options.fresh, options.quiet)

    run_command(body, "experiments.carrier")


if __name__ == "__main__":
    main()
