"""The tables of a causes run."""

from typing import Any

from experiments.causes.rules import ULPS
from experiments.harness.markdown import number, paragraphs, rate, run_head, table
from experiments.harness.panel import shortfall

CELL_HEADER = ["cell", "cache exact", "first difference", "relative L2", "suffix", "answer", "correct"]
VERDICT_HEADER = [
    "dtype",
    "endpoint",
    "rows differing by default",
    "factor",
    "sufficient",
    "necessary",
    "rows, both invariant",
]


def causes_report(manifest: dict[str, Any], summary: dict[str, Any]) -> str:
    """report.md: cells, verdicts, chunks, oracle, margins."""
    parts = [
        run_head(manifest, summary),
        shortfall(summary["panel"]),
        "## Cells\n\n" + _cells(summary["cells"]),
        "## Which kernel causes the difference\n\n" + _verdicts(summary["verdicts"]) if summary["verdicts"] else "",
        "## Prefill in chunks against incremental\n\n" + _chunks(summary["chunks"]) if summary["chunks"] else "",
        "## One query alone against all in one call\n\n" + _alone(summary["alone"]),
        "## Distance to FP64\n\n" + _oracle(summary["oracle"]),
        "## Margins at the first divergence\n\n" + _margins(summary["margins"]),
    ]
    return paragraphs(parts)


def _cells(cells: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{c['cache']['exact_rows']}/{c['compared_rows']}",
            c["first_difference"]["most_common"] or "none",
            number(c["cache"]["relative_l2_median"]),
            rate(c["suffix_disagreement"]),
            rate(c["answer_disagreement"]),
            rate(c["correctness_disagreement"]),
        )
        for name, c in cells.items()
        if c["compared_rows"]
    ]
    return table(CELL_HEADER, rows)


def _verdicts(verdicts: dict[str, Any]) -> str:
    rows = [
        (
            dtype,
            endpoint,
            found["default_differs"],
            factor,
            "yes" if found[factor]["sufficient"] else "no",
            "yes" if found[factor]["necessary"] else "no",
            found["invariant_differs"],
        )
        for dtype, endpoints in verdicts.items()
        for endpoint, found in endpoints.items()
        for factor in ("attention", "linear")
    ]
    return table(VERDICT_HEADER, rows)


def _chunks(chunks: dict[str, Any]) -> str:
    rows = [
        (cell, chunk, f"{c['exact_rows']}/{c['rows']}", number(c["share_median"]), number(c["relative_l2_median"]))
        for cell, curve in chunks.items()
        for chunk, c in curve.items()
    ]
    return table(["cell", "chunk", "exact", "share of elements", "relative L2"], rows)


def _alone(alone: dict[str, Any]) -> str:
    rows = [
        (dtype, operation, f"{count['differing']}/{count['rows']}")
        for dtype, operations in alone.items()
        for operation, count in operations.items()
    ]
    return table(["dtype", "attention, on random inputs", "queries with other bits alone"], rows)


def _oracle(oracle: dict[str, Any]) -> str:
    rows = [
        (
            name,
            *(number(o["median"][arm]["cache_relative_l2"]) for arm in ("incremental", "prefill")),
            o["nearer"]["incremental"],
            o["nearer"]["prefill"],
            o["nearer"]["equal"],
        )
        for name, o in oracle.items()
        if o["rows"]
    ]
    return table(["cell", "incremental", "prefill", "incremental nearer", "prefill nearer", "equal"], rows)


def _margins(margins: dict[str, Any]) -> str:
    rows = [
        (
            name,
            m["diverging_rows"],
            *(number(m["within_ulps"][str(k)]) for k in ULPS),
            number(m["spearman"]),
            number(m["tied_steps"]),
        )
        for name, m in margins.items()
    ]
    within = [f"within {k} ULP" for k in ULPS]
    return table(["cell", "diverging rows", *within, "rank correlation", "ties among all steps"], rows)


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """stdout: one line a dtype."""
    gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
    lines = [f"causes: {summary['rows']} cell rows, gates {gates}"]
    for dtype, endpoints in summary["verdicts"].items():
        for endpoint, found in endpoints.items():
            causes = [
                f"{factor} {'necessary' if found[factor]['necessary'] else 'not necessary'}, "
                f"{'sufficient' if found[factor]['sufficient'] else 'not sufficient'}"
                for factor in ("attention", "linear")
            ]
            lines.append(
                f"{dtype} {endpoint}: {found['default_differs']} rows differ by default, "
                f"{found['invariant_differs']} with both kernels invariant; {'; '.join(causes)}"
            )
    return lines
