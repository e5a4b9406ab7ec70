"""Values of summary.json as text: blocks known by their keys become one line each, everything else its leaves; and the
lines on stdout with which a run ends."""

from collections.abc import Iterator, Mapping
from typing import Any

from stats.intervals import NO_INTERVAL

LIST_SHOWN = 24


def rate(block: Mapping[str, Any]) -> str:
    """Returns '166/200 = 83.0 % [77.2, 87.6]' of a {count, n, rate, wilson_95} block."""
    if block["rate"] is None:
        return f"{block['count']}/{block['n']}"
    low, high = block["wilson_95"]
    return f"{block['count']}/{block['n']} = {100 * block['rate']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def number(value: float | None, digits: int = 3) -> str:
    """Returns significant digits, or 'none'."""
    return "none" if value is None else f"{value:.{digits}g}"


def change(block: Mapping[str, Any]) -> str:
    """Returns '+1.0 points, 95 % [-3.5, +5.5]' of a block with a paired difference, or why it has no interval.

    A bootstrap over rows that all have the same difference is a point and no interval: it says nothing of other rows.
    """
    points, note, bounds = block["difference_points"], block.get("bootstrap_note"), block["bootstrap_95"]
    if points is None:
        return "no rows"
    if note or bounds is None:
        return f"{points:+.1f} points, {NO_INTERVAL.get(note or 'too few', note)}"
    return f"{points:+.1f} points, 95 % [{', '.join(f'{bound:+.1f}' for bound in bounds)}]"


def describe(value: Any) -> str | None:
    """Returns one line for a scalar or a known block; None for a container that has to be taken apart."""
    if isinstance(value, list):
        more = f", and {len(value) - LIST_SHOWN} more" if len(value) > LIST_SHOWN else ""
        flat = not any(isinstance(item, (dict, list)) for item in value)
        return (", ".join(map(scalar, value[:LIST_SHOWN])) or "none") + more if flat else None
    if not isinstance(value, dict):
        return scalar(value)
    keys = set(value)
    if {"count", "n", "rate", "wilson_95"} <= keys:
        return _join(rate(value), value, {"count", "n", "rate", "wilson_95"})
    if {"difference_points", "bootstrap_95"} <= keys and not any(isinstance(v, dict) for v in value.values()):
        return _join(change(value), value, {"difference_points", "bootstrap_95", "bootstrap_note"})
    if keys in ({"passed", "of"}, {"correct", "n"}):
        first, second = value.values()
        return f"{first}/{second}"
    if {"median", "min", "max"} <= keys <= {"n", "median", "min", "max"}:
        if value["median"] is None:
            return "none"
        text = f"median {number(value['median'])}, range {number(value['min'])} to {number(value['max'])}"
        return f"{text} ({value['n']} rows)" if "n" in value else text
    return f"{scalar(value['min'])} to {scalar(value['max'])}" if keys == {"min", "max"} else None


def _join(text: str, block: dict[str, Any], shown: set[str]) -> str:
    rest = ", ".join(f"{words(key)} {describe(value)}" for key, value in block.items() if key not in shown)
    return f"{text}; {rest}" if rest else text


def scalar(value: Any) -> str:
    """Returns a leaf as text: four significant digits of a float, everything else as it is."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def words(key: str) -> str:
    """Returns a JSON key as words."""
    return key.replace("_", " ")


def entries(value: Any, label: str = "") -> Iterator[tuple[str, str]]:
    """Yields (label, text) of every known block and leaf under `value`."""
    text = describe(value)
    if text is not None:
        yield label, text
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from entries(inner, f"{label}, {words(key)}" if label else words(key))
    else:
        for index, inner in enumerate(value):
            yield from entries(inner, f"{label} {index + 1}".strip())


def outcome(summary: Mapping[str, Any]) -> str:
    """Returns the start of every closing line: 'bridge bf16: 12 rows, gates all passed'."""
    gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
    return f"{summary['experiment']} {summary['dtype']}: {summary['rows']} rows, gates {gates}"


def withheld(summary: Mapping[str, Any]) -> str:
    """Returns the closing line of a run whose endpoints are no result."""
    return f"{outcome(summary)}; endpoints withheld: {summary['no_result']}"


def closing_line(summary: Mapping[str, Any]) -> str:
    """Returns the closing line of a run with one comparison of scored arms, all of whose rows passed."""
    line = f"{outcome(summary)}; {summary['comparison']} disagree on suffix {rate(summary['suffix_disagreement'])}"
    answers, labels = rate(summary["answer_disagreement"]), rate(summary["correctness_disagreement"])
    return f"{line}, answer {answers}, correctness {labels}"


def donor_line(summary: Mapping[str, Any]) -> str:
    """Returns the closing line of whole-cache transplants."""
    found = summary["endpoints"]
    return (
        f"{outcome(summary)}; diverge {rate(found['baseline_divergence'])}, "
        f"both transplants recover the donor {rate(found['bidirectional_donor_recovery'])}, "
        f"novel on exact rows {rate(found['exact_control_novel_trajectory'])}"
    )
