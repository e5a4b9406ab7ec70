"""One section an experiment: what it asks, its gates, its endpoints in every run side by side, its drawings.

Known blocks of a summary get the paper's tables; what this code has never heard of is taken apart by its keys, so that
a new experiment is reported whole on its first day.
"""

from collections.abc import Sequence
from typing import Any

from experiments.harness.markdown import pair_rows
from experiments.reporting.beyond import carrier_blocks, causes_blocks
from experiments.reporting.document import Alert, Block, Cell, Figure, Link, Paragraph, Section, Table, Verdict, table
from experiments.reporting.grids import TRANSPLANTS, transplant_figure
from experiments.reporting.plots import accuracy_figure, divergence_figure, drift_figure, rates_figure
from experiments.reporting.runs import Pair, Run, pairs
from experiments.reporting.values import change, describe, entries, leaves, words

# experiment: (title, what it asks); the order is that of the study
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
    "causes": ("Causes", "Kernels, precisions and constructions crossed on the same fixed prefixes."),
    "carrier": ("Carriers", "Partial transplants: which part of the cache carries the trajectory."),
}
HEAD = {"experiment", "dtype", "rows", "passed", "failed_rows", "gates"}
PAIR = {
    "comparison",
    "compared_rows",
    "suffix_disagreement",
    "merge_disagreement",
    "answer_disagreement",
    "correctness_disagreement",
    "accuracy",
    "first_divergence",
    "cache",
    "logits",
    "argmax_equal_rows",
}
BEYOND = {"causes": causes_blocks, "carrier": carrier_blocks}  # their own tables and drawings
TOLD = {  # keys with a table or a line of their own
    *("precisions", "cross_precision", "interpretation"),
    *("cells", "verdicts", "chunks", "oracle", "margins", "sites", "smallest"),
}


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by experiment, in the study's order; unknown experiments follow in the order given."""
    found = {run.experiment: [one for one in runs if one.experiment == run.experiment] for run in runs}
    known = [name for name in EXPERIMENTS if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in known)]}


def experiment_section(experiment: str, runs: Sequence[Run]) -> Section:
    """Everything about one experiment."""
    title, asks = EXPERIMENTS.get(experiment, (words(experiment), ""))
    finished = [run for run in runs if run.summary is not None]
    compared = [pair for run in finished for pair in pairs(run)]
    blocks: list[Block] = [Paragraph(asks)] if asks else []
    blocks += [Alert(fault) for run in runs for fault in run.faults()]
    blocks += _interpretations(finished)
    blocks += _pair_table(compared)
    blocks += [crossing_table(run) for run in finished if (run.summary or {}).get("cross_precision")]
    blocks += _drawings(experiment, compared, finished)
    for run in finished:
        blocks += BEYOND[experiment](run, run.summary or {}) if experiment in BEYOND else []
    blocks += further_tables(finished)
    blocks += [gate_table(finished)] if any((run.summary or {}).get("gates") for run in finished) else []
    blocks += [all_values(run) for run in finished]
    return Section(title, f"experiment-{_slug(experiment)}", tuple(blocks))


def head(run: Run, dtype: str = "") -> Link:
    """A column's heading: the run, and where its provenance stands."""
    return Link(f"{run.name}, {dtype}" if dtype else run.name, run.anchor)


def gate_table(runs: Sequence[Run]) -> Table:
    """Rows passed by gate; a gate with a failed row says so in its cell."""
    counts = [(run.summary or {}).get("gates", {}) for run in runs]
    names = list(dict.fromkeys(name for one in counts for name in one))
    lines = [[words(name), *(_gate(one.get(name)) for one in counts)] for name in names]
    return table("Integrity gates, rows passed", ["gate", *(head(run) for run in runs)], lines)


def _gate(count: dict[str, int] | None) -> str:
    if count is None:
        return ""
    return f"{count['passed']}/{count['of']}" + ("" if count["passed"] == count["of"] else " FAILED")


def _pair_table(compared: Sequence[Pair]) -> list[Block]:
    """One table for each pair of arms, one column a run and precision."""
    made: list[Block] = []
    for name in dict.fromkeys(pair.summary["comparison"] for pair in compared):
        mine = [pair for pair in compared if pair.summary["comparison"] == name]
        columns = [dict(pair_rows(pair.summary)) for pair in mine]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        lines = [[label, *(column.get(label, "not scored") for column in columns)] for label in labels]
        left, right = name.split(":")
        caption = f"{words(right)} against {words(left)}"
        made.append(table(caption, ["endpoint", *(head(pair.run, pair.dtype) for pair in mine)], lines))
    return made


def crossing_table(run: Run) -> Table:
    """What the change of precision does to each disagreement, paired by row."""
    assert run.summary is not None, "only finished runs have a crossing"
    block = run.summary["cross_precision"]
    left, right = block["left"], block["right"]
    lines: list[Sequence[Cell]] = []
    for key, one in block.items():
        if isinstance(one, dict) and f"{left}_count" in one:
            counts = [f"{one[f'{side}_count']}/{one['n']}" for side in (left, right)]
            only = f"{one[f'{left}_only']} / {one[f'{right}_only']}"
            lines.append([words(key), *counts, only, change(one), f"{one['mcnemar_p']:.3g}"])
        elif isinstance(one, dict) and "difference_points" in one:
            lines.append([words(key), "", "", "", change(one), ""])
        elif isinstance(one, dict):
            lines.append([words(key), "", "", "", describe(one) or "", ""])
    header = [head(run), left, right, f"only {left} / only {right}", f"{right} minus {left}", "McNemar p"]
    return table(f"{right} against {left} on the same prefixes", header, lines)


def _interpretations(runs: Sequence[Run]) -> list[Block]:
    labels = [(run, run.summary["interpretation"]) for run in runs if run.summary and "interpretation" in run.summary]
    return [
        Verdict(f"Frozen interpretation of {run.name}: {label}.")
        if label
        else Alert(f"{run.name}: a gate failed, so that no interpretation is given")
        for run, label in labels
    ]


def _drawings(experiment: str, compared: Sequence[Pair], runs: Sequence[Run]) -> list[Block]:
    if not compared:
        return []
    slug = _slug(experiment)
    scored = [pair for pair in compared if "accuracy" in pair.summary]
    found: list[Figure | None] = [
        rates_figure(f"{slug}-rates", compared),
        accuracy_figure(f"{slug}-accuracy", scored) if scored else None,
        divergence_figure(f"{slug}-divergence", compared),
        drift_figure(f"{slug}-drift", compared),
    ]
    for run in runs:
        if any(set(TRANSPLANTS.values()) <= set(row.get("arms", ())) for row in run.rows):
            found.append(transplant_figure(f"{run.anchor}-grid", run.name, run.rows))
    return [figure for figure in found if figure is not None]


def further_tables(runs: Sequence[Run]) -> list[Block]:
    """The summary's other keys: one table a container, one for all that stands alone."""
    rest = [(run, _rest(run.summary or {})) for run in runs]
    keys = list(dict.fromkeys(key for _, values in rest for key in values))
    single = [key for key in keys if all(describe(values.get(key)) is not None for _, values in rest)]
    made: list[Block] = []
    for key in keys:
        if key in single:
            continue
        listed = [(run, values[key]) for run, values in rest if _is_records(values.get(key))]
        made += [records_table(f"{words(key)}, {run.name}", records) for run, records in listed]
        others = [(run, values[key]) for run, values in rest if key in values and not _is_records(values[key])]
        made += [_columns(words(key), [(run, dict(entries(value))) for run, value in others])] if others else []
    if single:
        columns = [
            (run, {words(key): describe(values[key]) or "" for key in single if key in values}) for run, values in rest
        ]
        made.append(_columns("Other values", columns))
    return made


def records_table(caption: str, records: Sequence[dict[str, Any]]) -> Table:
    """A list of objects: one row an object, one column a key."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    return table(
        caption, [words(key) for key in keys], [[_inner(record.get(key, "")) for key in keys] for record in records]
    )


def _inner(value: Any) -> str:
    text = describe(value)
    return text if text is not None else "; ".join(f"{label} {told}" for label, told in entries(value))


def _columns(caption: str, columns: Sequence[tuple[Run, dict[str, str]]]) -> Table:
    labels = list(dict.fromkeys(label for _, column in columns for label in column))
    lines = [[label, *(column.get(label, "") for _, column in columns)] for label in labels]
    return table(caption, ["value", *(head(run) for run, _ in columns)], lines)


def _rest(summary: dict[str, Any]) -> dict[str, Any]:
    """What is neither the head nor a comparison's endpoints."""
    told = TOLD if summary.get("experiment") in EXPERIMENTS else set()
    skipped = HEAD | told | (PAIR if "compared_rows" in summary else set())
    return {key: value for key, value in summary.items() if key not in skipped}


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def all_values(run: Run) -> Table:
    """Every leaf of summary.json at full precision."""
    return table(
        f"Every value of {run.name}/summary.json", ["value", head(run)], list(leaves(run.summary)), folded=True
    )


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text).strip("-").lower() or "other"
