"""The blocks on causes: crossed kernels, chunked prefill, queries alone, distances to FP64, margins."""

from typing import Any

from experiments.causes.rules import ULPS
from experiments.report.blocks import Alert, Block, Figure, Table, table
from experiments.report.plots import log_curves
from experiments.report.runs import Run
from experiments.report.values import number, rate, scalar, words

FACTORS = ("attention", "linear")


def causes_blocks(run: Run, summary: dict[str, Any]) -> list[Block]:
    """Cells, verdicts, chunk curve, oracle distances and margins of a causes run."""
    without = summary.get("left_out", {})
    blocks: list[Block] = [Alert(f"{cell}: {reason}.", "Left out") for cell, reason in without.items()]
    blocks.append(cells_table(run, summary))
    if summary["verdicts"]:
        blocks.append(verdicts_table(run, summary))
    if summary["chunks"]:
        blocks.append(chunks_figure(f"{run.anchor}-chunks", summary["chunks"]))
    return [*blocks, alone_table(run, summary), oracle_table(run, summary), margins_table(run, summary)]


def cells_table(run: Run, summary: dict[str, Any]) -> Table:
    """Every cell of the crossing: dtype / attention kernel / linear kernel."""
    header = ["cell", "cache exact", "first difference", "relative L2, median", "suffix", "answer", "correctness"]
    endpoints = ("suffix_disagreement", "answer_disagreement", "correctness_disagreement")
    lines = []
    for name, cell in summary["cells"].items():
        if not cell["compared_rows"]:
            lines.append([name, "no rows", *[""] * 5])
            continue
        exact = f"{cell['cache']['exact_rows']}/{cell['compared_rows']}"
        first = scalar(cell["first_difference"]["most_common"])
        drift = number(cell["cache"]["relative_l2_median"])
        lines.append(
            [name, exact, first, drift, *(rate(cell[key]) if key in cell else "not scored" for key in endpoints)]
        )
    return table(f"Incremental against prefill in every cell, {run.name}", header, lines)


def verdicts_table(run: Run, summary: dict[str, Any]) -> Table:
    """The frozen rule's verdict per dtype and endpoint."""
    header = ["dtype, endpoint", "rows differing, default", "rows differing, both invariant"]
    header += [f"{factor}: {what}" for factor in FACTORS for what in ("sufficient", "necessary", "differs alone")]
    lines = []
    for dtype, endpoints in summary["verdicts"].items():
        for endpoint, found in endpoints.items():
            line = [f"{dtype}, {endpoint}", str(found["default_differs"]), str(found["invariant_differs"])]
            for factor in FACTORS:
                one = found[factor]
                line += [scalar(one["sufficient"]), scalar(one["necessary"]), f"{len(one['differs_alone'])} rows"]
            lines.append(line)
    return table(f"Which default kernel is sufficient, which necessary, {run.name}", header, lines)


def alone_table(run: Run, summary: dict[str, Any]) -> Table:
    """How many queries of one attention call have other bits when run alone, on random inputs."""
    alone = summary.get("alone", {})
    operations = list(dict.fromkeys(name for found in alone.values() for name in found))
    lines = [
        [
            name,
            *(f"{found[name]['differing']}/{found[name]['rows']}" if name in found else "" for found in alone.values()),
        ]
        for name in operations
    ]
    return table(
        f"Queries with other bits alone than in one call, random inputs, {run.name}",
        ["attention", *alone],
        lines,
    )


def oracle_table(run: Run, summary: dict[str, Any]) -> Table:
    """Distances to the same prefix in FP64."""
    header = ["cell", "incremental, cache L2", "prefill, cache L2", "incremental nearer", "prefill nearer", "equal"]
    lines = [
        [
            name,
            *(number(one["median"][arm]["cache_relative_l2"]) for arm in ("incremental", "prefill")),
            *(str(one["nearer"][side]) for side in ("incremental", "prefill", "equal")),
        ]
        for name, one in summary["oracle"].items()
        if one["rows"]
    ]
    return table(f"Distance of the boundary to FP64, medians and rows, {run.name}", header, lines)


def margins_table(run: Run, summary: dict[str, Any]) -> Table:
    """How near to a tie the first divergences happen."""
    header = [
        "cell",
        "diverging rows",
        *(f"margin within {k} ULP" for k in ULPS),
        "rank correlation",
        "ties, all steps",
    ]
    lines = [
        [
            name,
            str(one["diverging_rows"]),
            *(number(one["within_ulps"][str(k)]) for k in ULPS),
            number(one["spearman"]),
            number(one["tied_steps"]),
        ]
        for name, one in summary["margins"].items()
    ]
    return table(f"Margins at the first divergence, shares, {run.name}", header, lines)


def chunks_figure(name: str, chunks: dict[str, dict[str, Any]]) -> Figure:
    """Drift of prefill in calls of c tokens against incremental, one line per cell."""
    sizes = list(dict.fromkeys(size for curve in chunks.values() for size in curve))
    values = {cell: [curve.get(size, {}).get("relative_l2_median") for size in sizes] for cell, curve in chunks.items()}
    exact = {cell: [curve.get(size) for size in sizes] for cell, curve in chunks.items()}
    lines = [
        [
            words(size),
            *(f"{number(values[cell][k])} ({c['exact_rows']}/{c['rows']} exact)" if (c := exact[cell][k]) else ""
              for cell in values),
        ]
        for k, size in enumerate(sizes)
    ]  # fmt: skip
    return log_curves(
        name,
        [words(size) for size in sizes],
        values,
        ("tokens in one call of prefill", "relative L2, median"),
        "Prefill in chunks against incremental: relative L2 of the boundary cache, median; one token per call is the "
        "incremental construction, and an invariant kernel stays exact.",
        table("Relative L2 by chunk size", ["tokens per call", *values], lines),
    )
