"""Blocks from summaries, one column per run, for the page and for report.md of one run.

Known blocks of a summary get the paper's tables; unknown ones are taken apart by their keys, so that a new experiment
is reported whole without a line here.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.causes.rules import ULPS
from experiments.report.blocks import Alert, Block, Figure, Link, Paragraph, Report, Table, Verdict, column_table
from experiments.report.charts import cells, lines
from experiments.report.plain import render_markdown
from experiments.report.runs import Pair, Run, matched_matrices, pairs
from experiments.report.values import change, describe, entries, number, rate, scalar, words
from experiments.run.inputs import shortfall
from experiments.run.ledger import leaves
from experiments.run.records import Manifest, PairEndpoints, Summary

MCNEMAR = (
    "A McNemar test describes the direction of the discordant rows. A large p does not establish that the two arms are "
    "equivalent."
)
PANEL = (
    "The rows are a panel that was frozen by its selection rule before any was decoded. Their rates hold for these "
    "rows and do not estimate how often the effect occurs among all tasks or models."
)
OWN = "the checkpoint is the one that reached these prefixes, so this run replicates on no other checkpoint."
NUMERIC = ("dtype", "device", "attention", "linear", "threads")  # what a report says of a numeric contract
ENVIRONMENT = ("python", "platform", "machine", "torch", "cpu", "cpu_capability", "accelerator")  # the rest: manifest
LEADING = {"endpoints", "identity"}  # the registered endpoints of an experiment go before everything else
ENDPOINTS = set(PairEndpoints.__annotations__)
HEAD = {"experiment", "dtype", "rows", "passed", "failed_rows", "gates", "no_result"}
# experiment: keys that a table or a line of the page shows
SHOWN = {
    "fixed_prefix": {"precisions", "cross_precision"},
    "replication": {"interpretation"},
    "causes": {"left_out", "cells", "verdicts", "chunks", "oracle", "margins", "alone"},
    "carrier": {"sites", "smallest"},
}
# rows of the carrier map: label and site
MAP = {"K of layer i": "layer_{}_keys", "V of layer i": "layer_{}_values", "layer i": "layer_{}"}
MAP |= {"first i layers": "first_{}", "last i layers": "last_{}"}


def head(run: Run, dtype: str = "") -> Link:
    """Returns a column's heading: the run, and where its provenance stands."""
    return Link(f"{run.name}, {dtype}" if dtype else run.name, run.anchor)


def run_report(manifest: Manifest, summary: Summary) -> str:
    """Returns report.md of one finished run: what it was made with, its gates, and the same tables as on the page."""
    experiment = str(summary["experiment"])
    run = Run(Path(), experiment, "run", manifest, summary)
    blocks = [*head_blocks(manifest, summary), gate_table([run]), *endpoint_blocks(experiment, [run])]
    return render_markdown(Report(f"{experiment}, {summary['dtype']}", blocks), drawings=False)


def head_blocks(manifest: Manifest, summary: Summary) -> list[Block]:
    """Returns rows, numeric contract, environment, digests, and whether every gate passed."""
    recorded = manifest["environment"]
    environment = ", ".join(f"{words(key)} {recorded[key]}" for key in ENVIRONMENT if key in recorded)
    weights, tasks = manifest["checkpoint"].get("model.safetensors"), manifest.get("tasks_sha256")
    rows, failed, contracts = summary["rows"], summary["failed_rows"], numeric_text(manifest["numeric"])
    names = f": {', '.join(failed[:20])}" if failed else ""
    bad = f"gates failed on {len(failed)} of {rows} rows{names}. The numbers below are no result."
    model = f"SHA-256 {weights}" if weights else "sharded, their digests in the manifest"
    return [
        Paragraph(f"{rows} rows. Numeric contract: {contracts}. Environment: {environment}."),
        Paragraph(f"Checkpoint weights {model}; tasks {f'SHA-256 {tasks}' if tasks else 'not read'}."),
        Verdict("Every gate passed on every row.") if summary["passed"] else Alert(bad),
    ]


def numeric_text(contracts: list[dict[str, Any]]) -> str:
    """Returns the numeric contracts of a run one by one; where there are many, the values that each part takes."""
    form = "{} on {}, attention {}, linear {}, {} threads"
    if len(contracts) <= 3:
        return "; ".join(form.format(*(one[key] for key in NUMERIC)) for one in contracts)
    values = (", ".join(dict.fromkeys(str(one[key]) for one in contracts)) for key in NUMERIC)
    return f"{len(contracts)} of them, {form.format(*values)}; one by one in the manifest"


def endpoint_blocks(experiment: str, runs: Sequence[Run], drawings: Sequence[Block] = ()) -> list[Block]:
    """Returns everything that the summaries of finished `runs` say, with the cautions that apply.

    drawings: stand after the paper's tables.
    """
    reasons = [(run.name, run.summary.get("no_result")) for run in runs]
    blocks: list[Block] = [Alert(f"{name}: {why}", "The endpoints are no result") for name, why in reasons if why]
    panels = [(run.name, run.summary["panel"]) for run in runs if "panel" in run.summary]
    blocks += [Alert(f"{name}: {text}", "Note") for name, panel in panels for text in shortfall(panel)]
    for run in runs:
        if run.summary.get("own_checkpoint"):
            blocks.append(Alert(f"{run.name}: {OWN}", "Note"))
        if label := run.summary.get("interpretation"):
            blocks.append(Verdict(f"Frozen interpretation of {run.name}: {label}."))
        elif "interpretation" in run.summary:
            blocks.append(Alert(f"{run.name}: a gate failed, so that no interpretation is given"))
    blocks += further_tables(runs, lambda key: key in LEADING)
    blocks += pair_tables([pair for run in runs for pair in pairs(run)])
    for left, right, block in matched_matrices(runs):
        found = [["rows in both", str(block["rows"])], ["one integer prefix", rate(block["prefix_identity"])]]
        blocks.append(Table(f"Boundary prefixes of {left.name} and {right.name}", ["prefixes", "rows"], found))
        blocks.append(Paragraph(block["reading"]))
    crossed = [(run, run.summary.get("cross_precision") or {}) for run in runs]
    blocks += [crossing_table(run, block) for run, block in crossed if block.get("rows")]
    blocks += [*cautions([run.summary for run in runs]), *drawings]
    beyond = {"causes": causes_blocks, "carrier": carrier_blocks}.get(experiment)
    for run in runs:
        blocks += beyond(run) if beyond else []
    return blocks + further_tables(runs, lambda key: key not in LEADING)


def cautions(summaries: Sequence[Summary]) -> list[Block]:
    """Returns the paper's cautions that apply to any of the summaries, each once."""
    found: list[str] = []
    for summary in summaries:
        found += [MCNEMAR] if any(path.endswith("mcnemar_p") for path in leaves(summary)) else []
        if novel := (summary.get("endpoints") or {}).get("exact_control_novel_trajectory"):
            some = novel["rate"] is not None
            bound = f"{100 * novel['wilson_95'][1]:.1f} % as its upper bound" if some else "no bound at all"
            found.append(
                f"{novel['count']} of {novel['n']} exact rows left the shared trajectory after a transplant. So small "
                f"a control stratum has {bound}: it does not establish a low artifact rate."
            )
        found += [PANEL] if "panel" in summary else []
    return [Alert(text, "Note") for text in dict.fromkeys(found)]


def gate_table(runs: Sequence[Run]) -> Table:
    """Returns rows passed by gate; a gate with a failed row says so in its cell."""
    columns = []
    for run in runs:
        counts = {words(name): (one["passed"], one["of"]) for name, one in run.summary.get("gates", {}).items()}
        shown = {name: f"{n}/{of}{'' if n == of else ' FAILED'}" for name, (n, of) in counts.items()}
        columns.append((head(run), shown))
    return column_table("Integrity gates, rows passed", "gate", columns)


def pair_tables(compared: Sequence[Pair]) -> list[Block]:
    """Returns one table per pair of arms, one column per run and precision."""
    made: list[Block] = []
    for arms in dict.fromkeys(pair.arms for pair in compared):
        columns = [(head(pair.run, pair.dtype), pair_rows(pair.summary)) for pair in compared if pair.arms == arms]
        caption = f"{words(arms[1])} against {words(arms[0])}".capitalize()
        made.append(column_table(caption, "endpoint", columns, "not scored"))
    return made


def pair_rows(summary: PairEndpoints) -> dict[str, str]:
    """Returns the endpoints of one comparison by name; answers and accuracy if its arms are scored."""
    n, accuracy = summary["compared_rows"], summary.get("accuracy")
    rows = {
        "suffix disagreement": rate(summary["suffix_disagreement"]),
        "merge disagreement": rate(summary["merge_disagreement"]),
        "answer disagreement, token for token": rate(summary["answer_tokens_disagreement"]),
    }
    if accuracy is not None:
        left, right = summary["comparison"].split(":")
        rows["answer disagreement, as stated"] = rate(summary["answer_disagreement"])
        rows["correctness disagreement"] = rate(summary["correctness_disagreement"])
        rows |= {f"correct, {arm}": f"{accuracy[arm]['correct']}/{accuracy[arm]['n']}" for arm in (left, right)}
        rows[f"accuracy, {right} - {left}"] = change(accuracy)
        only = f"{accuracy['left_only']} / {accuracy['right_only']}; {accuracy['mcnemar_p']:.3g}"
        rows[f"only {left} / only {right} correct; McNemar p"] = only
    rows["first divergence, tokens after the boundary"] = describe(summary["first_divergence"]) or ""
    rows["diverge at the first suffix token"] = f"{summary['first_token_divergence_rows']}/{n}"
    for name in ("cache", "logits"):
        drift = summary[name]
        rows[f"boundary {name} bit-exact"] = f"{drift['exact_rows']}/{n}"
        rows[f"boundary {name} relative L2, median"] = number(drift["relative_l2_median"])
        rows[f"boundary {name} largest difference, median"] = number(drift["max_abs_median"])
    return rows | {"boundary argmax equal": f"{summary['argmax_equal_rows']}/{n}"}


def crossing_table(run: Run, block: dict[str, Any]) -> Table:
    """Returns what the change of precision does to each disagreement, paired by row. block: `cross_precision`."""
    left, right = block["left"], block["right"]
    rows = []
    for key, one in block.items():
        if isinstance(one, dict) and f"{left}_count" in one:
            counts = [f"{one[f'{side}_count']}/{one['n']}" for side in (left, right)]
            only = f"{one[f'{left}_only']} / {one[f'{right}_only']}"
            rows.append([words(key), *counts, only, change(one), f"{one['mcnemar_p']:.3g}"])
        elif isinstance(one, dict):
            text = change(one) if "difference_points" in one else describe(one) or ""
            rows.append([words(key), "", "", "", text, ""])
    header = [head(run), left, right, f"only {left} / only {right}", f"{right} minus {left}", "McNemar p"]
    return Table(f"{right} against {left} on the same prefixes", header, rows)


def further_tables(runs: Sequence[Run], wanted: Callable[[str], bool]) -> list[Block]:
    """Returns the summaries' other keys that are `wanted`: one table per container, one for all single values."""
    rest = []
    for run in runs:
        shown = HEAD | SHOWN.get(run.experiment, set()) | (ENDPOINTS if "compared_rows" in run.summary else set())
        rest.append((run, {k: value for k, value in run.summary.items() if k not in shown and wanted(k)}))
    keys = list(dict.fromkeys(key for _, values in rest for key in values))
    single = [key for key in keys if all(describe(values.get(key)) is not None for _, values in rest)]
    made: list[Block] = []
    for key in (key for key in keys if key not in single):
        found = [(run, values[key]) for run, values in rest if key in values]
        made += [_records(f"{words(key)}, {run.name}", value) for run, value in found if isinstance(value, list)]
        columns = [(head(run), dict(entries(value))) for run, value in found if not isinstance(value, list)]
        made += [column_table(words(key)[:1].upper() + words(key)[1:], "value", columns)] if columns else []
    if single:
        values = [(head(run), {words(k): describe(held[k]) or "" for k in single if k in held}) for run, held in rest]
        made.append(column_table("Values", "value", values))
    return made


def _records(caption: str, records: Sequence[Any]) -> Table:
    """Returns a list of objects with one row per object and one column per key, another list with one row per item."""
    objects = [one if isinstance(one, dict) else {"item": one} for one in records]
    keys = list(dict.fromkeys(key for one in objects for key in one))
    cells = [[dict(entries(one[key])) if key in one else {} for key in keys] for one in objects]
    lines = [["; ".join(f"{label} {text}".strip() for label, text in cell.items()) for cell in row] for row in cells]
    return Table(caption, list(map(words, keys)), lines)


def causes_blocks(run: Run) -> list[Block]:
    """Returns cells, verdicts, chunk curve, queries alone, oracle distances and margins of a causes run."""
    summary, name, arms = run.summary, run.name, ("incremental", "prefill")
    blocks: list[Block] = [Alert(f"{cell}: {why}.", "Left out") for cell, why in summary.get("left_out", {}).items()]
    header = ["cell", "cache exact", "first difference", "relative L2, median", "suffix", "answer", "correctness"]
    found = [[key, *_cell(cell)] for key, cell in summary["cells"].items()]
    blocks.append(Table(f"Incremental against prefill in every cell, {name}", header, found))
    if summary["verdicts"]:
        blocks.append(_verdicts(run))
    if summary["chunks"]:
        blocks.append(chunks_figure(f"{run.anchor}-chunks", summary["chunks"]))
    caption, alone = f"Queries with other bits alone than in one call, random inputs, {name}", []
    for dtype, counts in summary.get("alone", {}).items():
        alone.append((dtype, {key: f"{one['differing']}/{one['rows']}" for key, one in counts.items()}))
    blocks.append(column_table(caption, "attention", alone))
    header = ["cell", *(f"{arm}, cache L2" for arm in arms), *(f"{arm} nearer" for arm in arms), "equal"]
    found = []
    for key, one in summary["oracle"].items():
        if one["rows"]:
            distances = [number(one["median"][arm]["cache_relative_l2"]) for arm in arms]
            found.append([key, *distances, *(str(one["nearer"][side]) for side in (*arms, "equal"))])
    blocks.append(Table(f"Distance of the boundary to FP64, medians and rows, {name}", header, found))
    header = ["cell", "diverging rows", *(f"margin within {k} ULP" for k in ULPS)]
    header += ["rank correlation", "ties, all steps"]
    found = []
    for key, one in summary["margins"].items():
        shares = [*(one["within_ulps"][str(k)] for k in ULPS), one["spearman"], one["tied_steps"]]
        found.append([key, str(one["diverging_rows"]), *map(number, shares)])
    return [*blocks, Table(f"Margins at the first divergence, shares, {name}", header, found)]


def _cell(cell: dict[str, Any]) -> list[str]:
    """Returns the line of one cell of the crossing."""
    if not cell["compared_rows"]:
        return ["no rows", *[""] * 5]
    exact, first = f"{cell['cache']['exact_rows']}/{cell['compared_rows']}", cell["first_difference"]["most_common"]
    endpoints = (f"{key}_disagreement" for key in ("suffix", "answer", "correctness"))
    rates = (rate(cell[key]) if key in cell else "not scored" for key in endpoints)
    return [exact, scalar(first), number(cell["cache"]["relative_l2_median"]), *rates]


def _verdicts(run: Run) -> Table:
    """Returns the frozen rule's verdict per dtype and endpoint."""
    factors = ("attention", "linear")
    header = ["dtype, endpoint", "rows differing, default", "rows differing, both invariant"]
    header += [f"{factor}: {what}" for factor in factors for what in ("sufficient", "necessary", "differs alone")]
    rows = []
    for dtype, endpoints in run.summary["verdicts"].items():
        for endpoint, found in endpoints.items():
            line = [f"{dtype}, {endpoint}", str(found["default_differs"]), str(found["invariant_differs"])]
            for one in (found[factor] for factor in factors):
                line += [scalar(one["sufficient"]), scalar(one["necessary"]), f"{len(one['differs_alone'])} rows"]
            rows.append(line)
    return Table(f"Which default kernel is sufficient, which necessary, {run.name}", header, rows)


def chunks_figure(name: str, chunks: dict[str, dict[str, Any]]) -> Figure:
    """Returns the drift of prefill in calls of c tokens against incremental, one line per cell."""
    columns, series = [], []
    for cell, curve in chunks.items():
        shown = {size: f"({one['exact_rows']}/{one['rows']} exact)" for size, one in curve.items()}
        drift = {size: number(one["relative_l2_median"]) for size, one in curve.items()}
        columns.append((cell, {words(size): f"{drift[size]} {shown[size]}" for size in curve}))
        series.append((cell, [(words(size), one["relative_l2_median"]) for size, one in curve.items()]))
    caption = (
        "Prefill in chunks against incremental: relative L2 of the boundary cache, median; one token per call is the "
        "incremental construction, and an invariant kernel stays exact."
    )
    data = column_table("Relative L2 by chunk size", "tokens per call", columns)
    names = ("tokens in one call of prefill", "relative L2, median")
    return lines(name, caption, data, series, names, "exact")


def carrier_blocks(run: Run) -> list[Block]:
    """Returns the maps of both directions, every site with its intervals, and the smallest ranges."""
    sites = run.summary["sites"]
    directions = list(next(iter(sites.values()), {}))
    columns = [(way, side) for way in directions for side in ("donor", "recipient", "neither")]
    header = ["site", *(f"{words(way)}: {side}" for way, side in columns)]
    rows = [[words(site), *(rate(found[way][side]) for way, side in columns)] for site, found in sites.items()]
    ends = [
        [f"{end} k layers", words(way), ", ".join(map(scalar, found))]
        for end, by_direction in run.summary["smallest"].items()
        for way, found in by_direction.items()
    ]
    return [
        *(carrier_figure(f"{run.anchor}-{k}", way, sites) for k, way in enumerate(directions)),
        Table(f"Whose suffix follows a partial transplant, {run.name}", header, rows),
        Table("Fewest layers that give the donor's suffix", ["range", "direction", "k, one per row"], ends),
    ]


def carrier_figure(name: str, direction: str, sites: dict[str, Any]) -> Figure:
    """Returns the share of rows that follow the donor, by layer and by what of it was transplanted."""
    layers = [str(i) for i in range(sum(bool(re.fullmatch(r"layer_\d+", site)) for site in sites))]
    rows, found = [], []
    for label, site in MAP.items():
        donors = [sites.get(site.format(i), {}).get(direction, {}).get("donor") for i in layers]
        rows.append([label, *(rate(one) if one else "" for one in donors)])
        found.append([(one["count"], one["rate"] or 0.0) if one else None for one in donors])
    way = words(direction)
    caption = f"{way}: rows whose suffix becomes the donor's, by what was transplanted; the darker, the more."
    data = Table(f"Rows that follow the donor, {way}", ["part", *layers], rows)
    return cells(name, caption, data, found, "i")
