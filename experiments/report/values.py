"""Values of summary.json as text: blocks known by their keys become one line each, everything else its leaves."""

from collections.abc import Iterator
from typing import Any

from stats.intervals import NO_INTERVAL

LIST_SHOWN = 24


def rate(block: dict[str, Any]) -> str:
    """'166/200 = 83.0 % [77.2, 87.6]' of a {count, n, rate, wilson_95} block."""
    if block["rate"] is None:
        return f"{block['count']}/{block['n']}"
    low, high = block["wilson_95"]
    return f"{block['count']}/{block['n']} = {100 * block['rate']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, or 'none'."""
    return "none" if value is None else f"{value:.{digits}g}"


def change(block: dict[str, Any]) -> str:
    """'+1.0 points, 95 % [-3.5, +5.5]' of a block with a paired difference; the reason where it has no interval.

    A bootstrap over rows that all have the same difference is a point, no interval: it says nothing about other rows.
    """
    points, note, bounds = block["difference_points"], block.get("bootstrap_note"), block["bootstrap_95"]
    if points is None:
        return "no rows"
    if note or bounds is None:
        return f"{points:+.1f} points, {NO_INTERVAL.get(note or 'too few', note)}"
    return f"{points:+.1f} points, 95 % [{', '.join(f'{bound:+.1f}' for bound in bounds)}]"


def describe(value: Any) -> str | None:
    """One line for a scalar or a known block; None for a container that has to be taken apart."""
    if not isinstance(value, (dict, list)):
        return scalar(value)
    if isinstance(value, list):
        return _list(value) if not any(isinstance(item, (dict, list)) for item in value) else None
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
    if keys == {"min", "max"}:
        return f"{scalar(value['min'])} to {scalar(value['max'])}"
    return None


def scalar(value: Any) -> str:
    """A leaf: four significant digits of a float, everything else as it is."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def words(key: str) -> str:
    """A JSON key as words; the names of arms keep their spelling."""
    return key.replace("_", " ")


def entries(value: Any, label: str = "") -> Iterator[tuple[str, str]]:
    """(label, text) of every known block and leaf under `value`."""
    text = describe(value)
    if text is not None:
        yield label, text
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from entries(inner, f"{label}, {words(key)}" if label else words(key))
    else:
        for index, inner in enumerate(value):
            yield from entries(inner, f"{label} {index + 1}".strip())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, JSON value) of every leaf at full precision. An empty container is a leaf, so that none vanishes."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, repr(value) if isinstance(value, float) else str(value)


def _list(items: list[Any]) -> str:
    more = f", and {len(items) - LIST_SHOWN} more" if len(items) > LIST_SHOWN else ""
    return (", ".join(scalar(item) for item in items[:LIST_SHOWN]) or "none") + more


def _join(text: str, block: dict[str, Any], shown: set[str]) -> str:
    rest = [f"{words(key)} {describe(value)}" for key, value in block.items() if key not in shown]
    return "; ".join([text, ", ".join(rest)]) if rest else text
