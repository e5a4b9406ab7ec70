"""Writes benchmark.json and the report: tables and drawings from that object alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.report.blocks import Alert, Block, Figure, Paragraph, Report, Table, Verdict, column_table, table
from experiments.report.charts import lines as line_chart
from experiments.report.page import write_report
from experiments.report.plain import markdown_table
from experiments.run.directory import require_own, set_aside
from experiments.run.ledger import write_whole
from minimodel.errors import InputError

DOCUMENT = "benchmark.json"
KEYS = ("schema", "machine")  # by which a benchmark.json is recognised as ours
ABSENT = ""


def check(directory: Path, fresh: bool) -> None:
    """InputError where the directory holds files that would not be set aside. Writes nothing."""
    if fresh and directory.exists():
        require_own(directory, DOCUMENT, KEYS)
    elif directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory}: expected an empty directory, found files; choose --out or --fresh")


def write(document: dict[str, Any], directory: Path) -> None:
    """Writes benchmark.json, report.md, report.html and the drawings. An earlier benchmark is set aside."""
    if directory.exists() and any(directory.iterdir()):
        set_aside(directory, DOCUMENT, KEYS)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    write_whole(directory / DOCUMENT, text + "\n")
    write_report(report(document), directory)


def report(document: dict[str, Any]) -> Report:
    """Returns the report."""
    blocks: list[Block] = [Paragraph(text) for text in described(document)]
    blocks += [Alert(text, "Broken promise") for text in broken(document)]
    if (document["rows"] or "batch" in document) and not document["broken_promises"]:
        blocks.append(Verdict("Every column has the bits that it promises."))
    blocks += tables(document)
    if "batch" in document:
        blocks.append(batch_figure(document))
    if "growth" in document:
        blocks += growth_figures(document)
    return Report("Speed and memory", tuple(blocks))


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns the tables of what was measured."""
    found = [speed_table(document)] if document["rows"] else []
    found += [memory_table(document)] if "memory" in document else []
    found += [batch_table(document)] if "batch" in document else []
    return found + ([growth_table(document)] if "growth" in document else [])


def described(document: dict[str, Any]) -> list[str]:
    """Returns machine, numerics, checkpoint and what was left out, in sentences."""
    where, config, options = document["machine"], document["checkpoint"]["config"], document["options"]
    numeric, commit = where["numeric"], where["git_commit"] or "unknown"
    dirty = " with changes" if where["git_dirty"] else ""
    busy = [load for row in document["rows"] for load in row["load_average"]]
    return [
        f"{where['cpu']}, {where['cores']} cores, {numeric['threads']} threads, {numeric['device']}; torch "
        f"{where['environment']['torch']}, {where['environment']['cpu_capability']}; commit {commit[:12]}{dirty}; load "
        + (f"average {min(busy):.2f} to {max(busy):.2f}." if busy else "not taken."),
        f"{document['checkpoint']['directory']}: {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"vocabulary {config['vocab_size']}; {numeric['dtype']}, two copies. {options['repeats']} rounds of short and "
        f"{options['long_repeats']} of long measurements.",
        *(f"Omitted: {text}." for text in document["omitted"]),
        *([] if options["reference"] else ["No reference: --reference tests.hf.bench_arm adds transformers."]),
    ]


def broken(document: dict[str, Any]) -> list[str]:
    """Returns one sentence per broken promise."""
    return [f"{row}: {a} has other bits than {b}" for row, a, b in document["broken_promises"]]


def printed(document: dict[str, Any]) -> str:
    """Returns the same tables for the terminal."""
    parts = ["\n".join(described(document)), *map(markdown_table, tables(document))]
    return "\n\n".join([*parts, *broken(document)])


def speed_table(document: dict[str, Any]) -> Table:
    """Returns per measured row: the figure, speed against the baseline, time over floor and read limit, the bits."""
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
    """Returns load time and peak memory, each arm in fresh processes."""
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
    """Returns the cost of an incremental build against its length, at up to twelve of the measured lengths."""
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


def batch_table(document: dict[str, Any]) -> Table:
    """Returns, by series and size: tokens per second of all requests, speed against one at a time, and the bits."""
    entry, lines = document["batch"], []
    for name, cells in entry["series"].items():
        for size, cell in cells.items():
            held = f"{entry['cache_bytes'][size] / 1e6:.3g}"
            rate = f"{1 / cell['seconds']['median']:.4g}"
            lines.append([name, size, rate, _times(cell["speed"]), cell["bits"], held])
    header = ["", "requests", "tokens/s", "times one at a time", "bits against one at a time", "K/V, MB"]
    return table(f"Requests decoded together, context {entry['context']}", header, lines)


def batch_figure(document: dict[str, Any]) -> Figure:
    """Returns throughput against the number of requests, a line per series; one request at a time is a point."""
    series = document["batch"]["series"]
    columns = [
        (name, {size: f"{1 / cell['seconds']['median']:.4g}" for size, cell in found.items()})
        for name, found in series.items()
    ]
    data = column_table("Throughput, tokens/s", "requests", columns)
    caption = "Throughput against the number of requests decoded together."
    return line_chart("batch", caption, data, ("requests decoded together", "tokens/s of all requests"))


def growth_figures(document: dict[str, Any]) -> list[Figure]:
    """Returns three drawings over the context length: cost per step, cost so far, memory."""
    growth, names = document["growth"], document["columns"]
    steps = {n: [s * 1e3 for s in growth["step_seconds"][n]] for n in names}
    held = {"K and V, two copies": [size / 1e6 for size in growth["cache_bytes"]]}
    step, build = "Cost of a decode step against its context.", "Cost of a whole incremental build against its length."
    return [
        _growth("growth-step", growth["ends"], steps, "ms per step", step),
        _growth("growth-build", growth["ends"], growth["total_seconds"], "s in all", build),
        _growth("growth-cache", growth["ends"], held, "MB", "Memory of the cache against its length."),
    ]


def _growth(name: str, ends: Sequence[int], curves: dict[str, list[float]], unit: str, caption: str) -> Figure:
    lines = [[str(end), *(f"{values[at]:.3g}" for values in curves.values())] for at, end in enumerate(ends)]
    data = table(f"{caption[:-1]}, {unit}", ["tokens", *curves], lines, folded=True)
    return line_chart(name, caption, data, ("tokens in the cache", unit))
