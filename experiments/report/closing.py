"""The lines on stdout with which a run ends."""

from collections.abc import Mapping
from typing import Any

from experiments.report.values import rate


def outcome(summary: Mapping[str, Any]) -> str:
    """The start of every closing line: 'bridge bf16: 12 rows, gates all passed'."""
    gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
    return f"{summary['experiment']} {summary['dtype']}: {summary['rows']} rows, gates {gates}"


def withheld(summary: Mapping[str, Any]) -> str:
    """Returns the closing line of a run whose endpoints are no result."""
    return f"{outcome(summary)}; endpoints withheld: {summary['no_result']}"


def closing_line(summary: Mapping[str, Any]) -> str:
    """The line for one comparison."""
    head = outcome(summary)
    if "suffix_disagreement" not in summary:
        return head
    line = f"{head}; {summary['comparison']} disagree on suffix {rate(summary['suffix_disagreement'])}"
    if "accuracy" not in summary:
        return line
    answers, labels = rate(summary["answer_disagreement"]), rate(summary["correctness_disagreement"])
    return f"{line}, answer {answers}, correctness {labels}"


def donor_line(summary: Mapping[str, Any]) -> str:
    """The line for whole-cache transplants."""
    endpoints = summary["endpoints"]
    return (
        f"{outcome(summary)}; "
        f"diverge {rate(endpoints['baseline_divergence'])}, "
        f"both transplants recover the donor {rate(endpoints['bidirectional_donor_recovery'])}, "
        f"novel on exact rows {rate(endpoints['exact_control_novel_trajectory'])}"
    )
