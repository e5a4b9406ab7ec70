"""The lines on stdout with which a causes run ends."""

from typing import Any


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """One line per dtype and endpoint, after the head."""
    gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
    lines = [f"causes: {summary['rows']} cell rows, gates {gates}"]
    lines += [f"left out: {cell}: {reason}" for cell, reason in summary["left_out"].items()]
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
