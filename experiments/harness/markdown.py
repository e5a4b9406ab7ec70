"""Small pieces of report.md that every experiment prints alike."""

from collections.abc import Sequence
from typing import Any

NUMERIC = ("dtype", "device", "attention", "linear", "threads")  # what a report says of a numeric contract


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; every cell as text."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def paragraphs(parts: Sequence[str]) -> str:
    """A whole report.md of its parts, a blank line between two; empty ones are left out."""
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def rate(block: dict[str, Any]) -> str:
    """'166/200 = 83.0 % [77.2, 87.6]' of a {count, n, rate, wilson_95} block."""
    if block["rate"] is None:
        return f"{block['count']}/{block['n']}"
    low, high = block["wilson_95"]
    return f"{block['count']}/{block['n']} = {100 * block['rate']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, or 'none'."""
    return "none" if value is None else f"{value:.{digits}g}"


def interval(bounds: Sequence[float] | None) -> str:
    """'[-3.5, +5.5]', or 'none'."""
    return "none" if bounds is None else "[" + ", ".join(f"{bound:+.1f}" for bound in bounds) + "]"


def pair_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The endpoints of one comparison as (name, value) rows; answers and accuracy where its arms are scored."""
    divergence, drift, logits, n = (summary[key] for key in ("first_divergence", "cache", "logits", "compared_rows"))
    return [
        ("suffix disagreement", rate(summary["suffix_disagreement"])),
        ("merge disagreement", rate(summary["merge_disagreement"])),
        *(_scored_rows(summary) if "accuracy" in summary else []),
        (
            "first divergence, tokens after the boundary",
            f"median {number(divergence['median'], 4)}, range {divergence['min']} to {divergence['max']}"
            if divergence["median"] is not None
            else "no row diverges",
        ),
        ("boundary cache bit-exact", f"{drift['exact_rows']}/{n}"),
        ("boundary cache relative L2, median", number(drift["relative_l2_median"])),
        ("boundary cache largest difference, median", number(drift["max_abs_median"])),
        ("boundary logits bit-exact", f"{logits['exact_rows']}/{n}"),
        ("boundary argmax equal", f"{summary['argmax_equal_rows']}/{n}"),
    ]


def _scored_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    left, right = summary["comparison"].split(":")
    accuracy = summary["accuracy"]
    return [
        ("answer disagreement", rate(summary["answer_disagreement"])),
        ("correctness disagreement", rate(summary["correctness_disagreement"])),
        (f"correct, {left}", f"{accuracy[left]['correct']}/{accuracy[left]['n']}"),
        (f"correct, {right}", f"{accuracy[right]['correct']}/{accuracy[right]['n']}"),
        (
            f"accuracy, {right} - {left}, points",
            f"{accuracy['difference_points']:+.1f}, 95 % {interval(accuracy['bootstrap_95'])}",
        ),
        (
            f"only {left} / only {right} correct; McNemar p",
            f"{accuracy['left_only']} / {accuracy['right_only']}; {accuracy['mcnemar_p']:.3g}",
        ),
    ]


def run_head(manifest: dict[str, Any], summary: dict[str, Any]) -> str:
    """Title, numeric contract, environment and gates."""
    numeric = numeric_text(manifest["numeric"])
    environment = ", ".join(f"{key} {value}" for key, value in manifest["environment"].items())
    digest = manifest["tasks_sha256"]
    tasks = "not read" if digest is None else f"SHA-256 `{digest}`"
    gates = table(["gate", "rows passed"], [(g, f"{c['passed']}/{c['of']}") for g, c in summary["gates"].items()])
    verdict = (
        "Every gate passed on every row."
        if summary["passed"]
        else (f"GATES FAILED on {len(summary['failed_rows'])} rows: {', '.join(summary['failed_rows'][:20])}.")
    )
    return (
        f"# {summary['experiment']}, {summary['dtype']}\n\n"
        f"{summary['rows']} rows. Numeric contract: {numeric}. Environment: {environment}.\n\n"
        f"Checkpoint weights SHA-256 `{manifest['checkpoint'].get('model.safetensors', 'sharded')}`, "
        f"tasks {tasks}.\n\n{verdict}\n\n{gates}\n"
    )


def numeric_text(contracts: list[dict[str, Any]]) -> str:
    """The numeric contracts of a run, one by one, or what they are made of where they are many."""
    if len(contracts) > 3:
        names = {key: dict.fromkeys(str(one[key]) for one in contracts) for key in NUMERIC}
        dtypes, devices, attention, linear, threads = (", ".join(names[key]) for key in NUMERIC)
        return (
            f"{len(contracts)} of them, {dtypes} on {devices}, attention {attention}, linear {linear}, "
            f"{threads} threads; one by one in the manifest"
        )
    return "; ".join(
        f"{one['dtype']} on {one['device']}, attention {one['attention']}, linear {one['linear']}, "
        f"{one['threads']} threads"
        for one in contracts
    )


def outcome(summary: dict[str, Any]) -> str:
    """How every closing line begins: 'bridge bf16: 12 rows, gates all passed'."""
    gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
    return f"{summary['experiment']} {summary['dtype']}: {summary['rows']} rows, gates {gates}"


def closing_line(summary: dict[str, Any]) -> str:
    """The line on stdout for one comparison."""
    head = outcome(summary)
    if "suffix_disagreement" not in summary:
        return head
    line = f"{head}; {summary['comparison']} disagree on suffix {rate(summary['suffix_disagreement'])}"
    if "accuracy" not in summary:
        return line
    answers, labels = rate(summary["answer_disagreement"]), rate(summary["correctness_disagreement"])
    return f"{line}, answer {answers}, correctness {labels}"
