"""The tables of a benchmark, from benchmark.json's object alone."""

from typing import Any

from experiments.report.blocks import Table, table

ABSENT = ""


def speed_table(document: dict[str, Any]) -> Table:
    """Every measured row: the figure, how often as fast as the baseline, over its floor and its limit, the bits."""
    names, baseline = document["columns"], document["baseline"]
    lines: list[list[str]] = []
    for row in document["rows"]:
        cells = row["columns"]
        lines.append([f"{row['name']}: {row['unit']}", *(_figure(cells[n]["seconds"], row) for n in names)])
        lines.append([f"times as fast as {baseline}", *(_times(cells[n]["speed"]) for n in names)])
        if any("over_floor" in cells[n] for n in names):
            lines.append(["over its floor", *(_times(cells[n].get("over_floor")) for n in names)])
        if row["limit"] is not None:
            label = f"over the read limit of {row['limit']['seconds']['median'] * 1e3:.3g} ms"
            lines.append([label, *(_times(cells[n].get("over_limit")) for n in names)])
        lines.append([f"bits against {baseline}", *(cells[n]["bits"] for n in names)])
    return table("Speed: median [quartiles]", ["", *names], lines)


def memory_table(document: dict[str, Any]) -> Table:
    """Loading and peak memory, each arm in fresh processes."""
    names, memory = document["columns"], document["memory"]
    cells = memory["columns"]
    lines = [["loading: s", *(_spread(cells[n]["seconds"], 1.0) for n in names)]]
    lines.append([f"times as fast as {document['baseline']}", *(_times(cells[n]["speed"]) for n in names)])
    for key, label in (("imports", "imported"), ("loaded", "peak until loaded"), ("peak", "peak of it all")):
        lines.append([f"memory, {label}: MB", *(f"{cells[n][key]['median'] / 1e6:.0f}" for n in names)])
    loading = [f"{(cells[n]['loaded']['median'] - 1.1 * memory['weights']) / 1e6:.0f}" for n in names]
    lines.append(["peak until loaded beyond 1.1 times the weights: MB", *loading])
    return table(f"Fresh processes; weights of {memory['weights'] / 1e6:.0f} MB", ["", *names], lines)


def growth_table(document: dict[str, Any]) -> Table:
    """Cost of a build token by token against its length, at up to twelve of the measured lengths."""
    names, growth = document["columns"], document["growth"]
    ends = growth["ends"]
    shown = sorted({round(i * (len(ends) - 1) / 11) for i in range(12)})
    lines = []
    for at in shown:
        steps = [f"{growth['step_seconds'][n][at] * 1e3:.3g}" for n in names]
        totals = [f"{growth['total_seconds'][n][at]:.3g}" for n in names]
        held = f"{growth['cache_bytes'][at] / 1e6:.3g}"
        lines.append([str(ends[at]), held, *(f"{s} / {t}" for s, t in zip(steps, totals))])
    return table("Growth: ms a step there / s in all until there", ["context", "K/V, MB", *names], lines)


def _figure(spread: dict[str, Any], row: dict[str, Any]) -> str:
    if row["unit"] == "tokens/s":
        low, high = spread["quartiles"]
        turned = {"median": 1 / spread["median"], "quartiles": [1 / high, 1 / low]}
        return _spread(turned, float(row["tokens"]), digits=4)
    return _spread(spread, 1e3 if row["unit"] == "ms" else 1.0)


def _spread(spread: dict[str, Any], scale: float, digits: int = 3) -> str:
    median, (low, high) = spread["median"], spread["quartiles"]
    return f"{_digits(median * scale, digits)} [{_digits(low * scale, digits)}, {_digits(high * scale, digits)}]"


def _times(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return ABSENT
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f} [{low:.2f}, {high:.2f}]"


def _digits(value: float, digits: int) -> str:
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
