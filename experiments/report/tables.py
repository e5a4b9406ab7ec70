"""Tables of summaries: known blocks in the paper's form, everything else taken apart by its keys."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.report.blocks import Block, Cell, Link, Paragraph, Table, table
from experiments.report.runs import Pair, Run, matched_matrices
from experiments.report.values import change, describe, entries, leaves, number, rate, words

HEAD = {"experiment", "dtype", "rows", "passed", "failed_rows", "gates", "no_result"}
PAIR = {
    "comparison",
    "compared_rows",
    "suffix_disagreement",
    "merge_disagreement",
    "answer_disagreement",
    "answer_tokens_disagreement",
    "first_token_divergence_rows",
    "correctness_disagreement",
    "accuracy",
    "first_divergence",
    "cache",
    "logits",
    "argmax_equal_rows",
}
# experiment: keys that have a table or a line of their own
TOLD = {
    "fixed_prefix": {"precisions", "cross_precision"},
    "replication": {"interpretation"},
    "causes": {"left_out", "cells", "verdicts", "chunks", "oracle", "margins", "alone"},
    "carrier": {"sites", "smallest"},
}


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


def pair_tables(compared: Sequence[Pair]) -> list[Block]:
    """One table per pair of arms, one column per run and precision."""
    made: list[Block] = []
    for name in dict.fromkeys(pair.summary["comparison"] for pair in compared):
        mine = [pair for pair in compared if pair.summary["comparison"] == name]
        columns = [dict(pair_rows(pair.summary)) for pair in mine]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        lines = [[label, *(column.get(label, "not scored") for column in columns)] for label in labels]
        left, right = name.split(":")
        caption = f"{words(right)} against {words(left)}".capitalize()
        made.append(table(caption, ["endpoint", *(head(pair.run, pair.dtype) for pair in mine)], lines))
    return made


def pair_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The endpoints of one comparison as (name, value) rows; answers and accuracy where its arms are scored."""
    divergence, drift, logits, n = (summary[key] for key in ("first_divergence", "cache", "logits", "compared_rows"))
    return [
        ("suffix disagreement", rate(summary["suffix_disagreement"])),
        ("merge disagreement", rate(summary["merge_disagreement"])),
        ("answer disagreement, token for token", rate(summary["answer_tokens_disagreement"])),
        *(_scored_rows(summary) if "accuracy" in summary else []),
        ("first divergence, tokens after the boundary", describe(divergence) or ""),
        ("diverge at the first suffix token", f"{summary['first_token_divergence_rows']}/{n}"),
        ("boundary cache bit-exact", f"{drift['exact_rows']}/{n}"),
        ("boundary cache relative L2, median", number(drift["relative_l2_median"])),
        ("boundary cache largest difference, median", number(drift["max_abs_median"])),
        ("boundary logits bit-exact", f"{logits['exact_rows']}/{n}"),
        ("boundary logits relative L2, median", number(logits["relative_l2_median"])),
        ("boundary logits largest difference, median", number(logits["max_abs_median"])),
        ("boundary argmax equal", f"{summary['argmax_equal_rows']}/{n}"),
    ]


def _scored_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    left, right = summary["comparison"].split(":")
    accuracy = summary["accuracy"]
    return [
        ("answer disagreement, as stated", rate(summary["answer_disagreement"])),
        ("correctness disagreement", rate(summary["correctness_disagreement"])),
        *((f"correct, {arm}", f"{accuracy[arm]['correct']}/{accuracy[arm]['n']}") for arm in (left, right)),
        (f"accuracy, {right} - {left}", change(accuracy)),
        (
            f"only {left} / only {right} correct; McNemar p",
            f"{accuracy['left_only']} / {accuracy['right_only']}; {accuracy['mcnemar_p']:.3g}",
        ),
    ]


def matched_prefix_blocks(runs: Sequence[Run]) -> list[Block]:
    """Returns the prefix identity of every two matrices that decoded the same tasks and checkpoint in two precisions,
    with the sentence that says how their endpoints may be compared."""
    made: list[Block] = []
    for left, right, block in matched_matrices(runs):
        lines = [["rows in both", str(block["rows"])], ["one integer prefix", rate(block["prefix_identity"])]]
        made.append(table(f"Boundary prefixes of {left.name} and {right.name}", ["prefixes", "rows"], lines))
        made.append(Paragraph(block["reading"]))
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


def further_tables(runs: Sequence[Run], wanted: Callable[[str], bool]) -> list[Block]:
    """The summary's other keys that are `wanted`: one table per container, one for all single values."""
    rest = [(run, {key: value for key, value in _rest(run.summary or {}).items() if wanted(key)}) for run in runs]
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
        made.append(_columns("Values", columns))
    return made


def records_table(caption: str, records: Sequence[dict[str, Any]]) -> Table:
    """A list of objects: one row per object, one column per key."""
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
    return table(caption[:1].upper() + caption[1:], ["value", *(head(run) for run, _ in columns)], lines)


def _rest(summary: dict[str, Any]) -> dict[str, Any]:
    """What is neither the head nor a comparison's endpoints."""
    skipped = HEAD | TOLD.get(str(summary.get("experiment")), set()) | (PAIR if "compared_rows" in summary else set())
    return {key: value for key, value in summary.items() if key not in skipped}


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def all_values(run: Run) -> Table:
    """Every leaf of summary.json at full precision."""
    return table(
        f"Every value of {run.name}/summary.json", ["value", head(run)], list(leaves(run.summary)), folded=True
    )
