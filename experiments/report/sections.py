"""What each experiment reports, as blocks: the page's section over all its runs, and report.md of one run.

Known blocks of a summary get the paper's tables; unknown ones are taken apart by their keys, so that a new experiment
is reported whole without a line here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.report.blocks import Alert, Block, Paragraph, Report, Section, Verdict
from experiments.report.carriers import carrier_blocks
from experiments.report.causes import causes_blocks
from experiments.report.cautions import cautions, head_blocks
from experiments.report.markdown import render_markdown
from experiments.report.plots import (
    TRANSPLANTS,
    accuracy_figure,
    divergence_figure,
    drift_figure,
    rates_figure,
    transplant_figure,
)
from experiments.report.runs import Pair, Run, pairs
from experiments.report.tables import (
    all_values,
    crossing_table,
    further_tables,
    gate_table,
    matched_prefix_blocks,
    pair_tables,
)
from experiments.report.values import words
from experiments.report.why import why_blocks
from experiments.run.inputs import shortfall

# experiment: (title, question); the order is that of the study
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "matrix": (
        "Retained live cache against prefill",
        "Each boundary is generated once. The retained live cache and a one-call prefill of the same tokens are then "
        "continued by one greedy suffix decoder; a replica of each is the floor of the comparison and its gate.",
    ),
    "fixed_prefix": (
        "Fixed prefixes across precision",
        "The same integer prefixes, built token by token and in one call, in each precision: what precision changes "
        "when nothing else does.",
    ),
    "bridge": (
        "Bridge: live against incremental",
        "Ordinary decoding reaches a new boundary; its exact prefix is then consumed token by token. Equal bits mean "
        "that the incremental construction stands for the live one.",
    ),
    "audit": ("Audit of two ledgers", "Two saved ledgers joined by row: every leaf that both record must agree."),
    "transplant": (
        "Whole-cache transplants",
        "Every K/V tensor of one construction is replaced by the other's, both ways, on rows frozen beforehand: does "
        "the suffix follow the cache?",
    ),
    "replication": (
        "Replication on another checkpoint",
        "The transplants again, on a later checkpoint and on rows chosen by prefix length alone; the label is the one "
        "that was frozen with the design.",
    ),
    "batch_control": ("Batch control", "One copy of an input against two identical copies in one batch."),
    "stock_control": (
        "Stock control",
        "One copy of a chat prompt against two identical copies in one batch, on a checkpoint without role table.",
    ),
    "causes": ("Causes", "Kernels, precisions and constructions crossed on the same fixed prefixes."),
    "carrier": ("Carriers", "Partial transplants: which part of the cache carries the trajectory."),
}
LEADING = {"endpoints", "identity"}  # the registered endpoints of an experiment go before everything else
BEYOND = {"causes": causes_blocks, "carrier": carrier_blocks}  # their own tables and drawings


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by experiment, in the study's order; unknown experiments follow in the order given."""
    found = {run.experiment: [one for one in runs if one.experiment == run.experiment] for run in runs}
    known = [name for name in EXPERIMENTS if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in known)]}


def experiment_section(experiment: str, runs: Sequence[Run]) -> Section:
    """The page's section on one experiment: its tables, and the drawings of its pairs and rows."""
    title, asks = EXPERIMENTS.get(experiment, (words(experiment), ""))
    finished = [run for run in runs if run.summary is not None]
    compared = [pair for run in finished for pair in pairs(run)]
    blocks: list[Block] = [Paragraph(asks)] if asks else []
    blocks += [Alert(fault) for run in runs for fault in run.faults()]
    blocks += endpoint_blocks(experiment, finished, _drawings(experiment, compared, finished))
    blocks += [gate_table(finished)] if any((run.summary or {}).get("gates") for run in finished) else []
    blocks += [all_values(run) for run in finished]
    return Section(title, f"experiment-{_slug(experiment)}", tuple(blocks))


def endpoint_blocks(experiment: str, runs: Sequence[Run], drawings: Sequence[Block] = ()) -> list[Block]:
    """Everything that the summaries of finished `runs` say, one column per run, with the cautions that apply.

    The drawings stand after the paper's tables.
    """
    compared = [pair for run in runs for pair in pairs(run)]
    blocks: list[Block] = [*_no_results(runs), *_shortfalls(runs), *_interpretations(runs)]
    blocks += further_tables(runs, lambda key: key in LEADING)
    blocks += pair_tables(compared)
    blocks += matched_prefix_blocks(runs)
    blocks += [crossing_table(run) for run in runs if ((run.summary or {}).get("cross_precision") or {}).get("rows")]
    blocks += cautions([run.summary or {} for run in runs])
    blocks += drawings
    for run in runs:
        blocks += BEYOND[experiment](run, run.summary or {}) if experiment in BEYOND else []
    return blocks + further_tables(runs, lambda key: key not in LEADING)


def run_report(manifest: dict[str, Any], summary: dict[str, Any]) -> str:
    """report.md of one finished run: what it was made with, its gates, and the same tables as on the page."""
    experiment = str(summary["experiment"])
    run = Run(Path(), experiment, "run", manifest, [], summary, [])
    blocks = [*head_blocks(manifest, summary), gate_table([run]), *endpoint_blocks(experiment, [run])]
    return render_markdown(Report(f"{experiment}, {summary['dtype']}", tuple(blocks)), drawings=False)


def _no_results(runs: Sequence[Run]) -> list[Block]:
    reasons = [(run, (run.summary or {}).get("no_result")) for run in runs]
    return [Alert(f"{run.name}: {reason}", "The endpoints are no result") for run, reason in reasons if reason]


def _shortfalls(runs: Sequence[Run]) -> list[Block]:
    told = [(run, shortfall(run.summary["panel"])) for run in runs if run.summary and "panel" in run.summary]
    return [Alert(f"{run.name}: {text}", "Note") for run, text in told if text]


def _interpretations(runs: Sequence[Run]) -> list[Block]:
    found: list[Block] = []
    for run in runs:
        summary = run.summary or {}
        if summary.get("own_checkpoint"):
            text = (
                "the checkpoint is the one that reached these prefixes, so this run replicates on no other checkpoint"
            )
            found.append(Alert(f"{run.name}: {text}.", "Note"))
        if summary.get("interpretation"):
            found.append(Verdict(f"Frozen interpretation of {run.name}: {summary['interpretation']}."))
        elif "interpretation" in summary:
            found.append(Alert(f"{run.name}: a gate failed, so that no interpretation is given"))
    return found


def _drawings(experiment: str, compared: Sequence[Pair], runs: Sequence[Run]) -> list[Block]:
    if not compared:
        return []
    slug = _slug(experiment)
    scored = [pair for pair in compared if "accuracy" in pair.summary]
    found: list[Block | None] = [
        rates_figure(f"{slug}-rates", compared),
        accuracy_figure(f"{slug}-accuracy", scored) if scored else None,
        divergence_figure(f"{slug}-divergence", compared),
        drift_figure(f"{slug}-drift", compared),
    ]
    for number, pair in enumerate(compared):
        found += why_blocks(f"{slug}-why-{number}", pair)
    for run in runs:
        if any(set(TRANSPLANTS.values()) <= set(row.get("arms", ())) for row in run.rows):
            found.append(transplant_figure(f"{run.anchor}-grid", run.name, run.rows))
    return [block for block in found if block is not None]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text).strip("-").lower() or "other"
