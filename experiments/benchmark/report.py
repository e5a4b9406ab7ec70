"""Writes benchmark.json and the report: tables and drawings from that object alone."""

import json
from pathlib import Path
from typing import Any

from experiments.report.blocks import Alert, Block, Figure, Paragraph, Report, Table, Verdict, column_table
from experiments.report.charts import lines as line_chart
from experiments.report.page import write_report
from experiments.report.plain import markdown_table
from experiments.run.directory import require_own, set_aside
from experiments.run.ledger import write_whole
from minimodel.errors import InputError

DOCUMENT = "benchmark.json"
KEYS = ("schema", "machine")  # by which a benchmark.json is recognised as ours


def check(directory: Path, fresh: bool) -> None:
    """Raises InputError where the directory holds files that would not be set aside. Writes nothing."""
    if fresh and directory.exists():
        require_own(directory, DOCUMENT, KEYS)
    elif directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory}: expected an empty directory, found files; choose --out or --fresh")


def write(document: dict[str, Any], directory: Path) -> None:
    """Writes benchmark.json, report.md, report.html and the drawings. An earlier benchmark is set aside."""
    if directory.exists():
        set_aside(directory, DOCUMENT, KEYS)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    write_whole(directory / DOCUMENT, text + "\n")
    blocks: list[Block] = [Paragraph(text) for text in described(document)]
    blocks += [Alert(text, "Other bits") for text in broken(document)]
    if (document["rows"] or "batch" in document) and not document["unequal_bits"]:
        blocks.append(Verdict("Every column has the bits that it must have."))
    blocks += tables(document)
    blocks += [batch_figure(document)] if "batch" in document else []
    blocks += growth_figures(document) if "growth" in document else []
    write_report(Report("Speed and memory", tuple(blocks)), directory)


def printed(document: dict[str, Any]) -> str:
    """Returns the same tables for the terminal."""
    parts = ["\n".join(described(document)), *map(markdown_table, tables(document))]
    return "\n\n".join([*parts, *broken(document)])


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns the tables of what was measured."""
    made = {"rows": speed_table, "memory": memory_table, "batch": batch_table, "growth": growth_table}
    return [make(document) for part, make in made.items() if document.get(part)]


def described(document: dict[str, Any]) -> list[str]:
    """Returns machine, numerics, checkpoint and what was left out, in sentences."""
    where, config, options = document["machine"], document["checkpoint"]["config"], document["options"]
    numeric, commit = where["numeric"], where["git_commit"] or "unknown"
    dirty = " with changes" if where["git_dirty"] else ""
    timed = [*document["rows"], *([document["batch"]] if "batch" in document else [])]
    busy = [load for entry in timed for load in entry["load_average"]]
    return [
        f"{where['cpu']}, {where['cores']} cores, {numeric['threads']} threads, {numeric['device']}; torch "
        f"{where['environment']['torch']}, {where['environment']['cpu_capability']}; commit {commit[:12]}{dirty}; load "
        + (f"average {min(busy):.2f} to {max(busy):.2f}." if busy else "not measured."),
        f"{document['checkpoint']['directory']}: {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"vocabulary {config['vocab_size']}; {numeric['dtype']}, two copies. {options['repeats']} rounds of short and "
        f"{options['long_repeats']} of long measurements.",
        *(f"Omitted: {text}." for text in document["omitted"]),
        *([] if options["reference"] else ["No reference: --reference tests.hf.bench_arm adds transformers."]),
    ]


def broken(document: dict[str, Any]) -> list[str]:
    """Returns one sentence per column whose bits are not those that it must have."""
    return [f"{row}: {a} has other bits than {b}" for row, a, b in document["unequal_bits"]]


def speed_table(document: dict[str, Any]) -> Table:
    """Returns per measured row: the figure, speed against the baseline, time over floor and read limit, the bits."""
    names, baseline = document["columns"], document["baseline"]
    lines: list[list[str]] = []
    for row in document["rows"]:
        cells = [row["columns"][name] for name in names]
        lines.append([f"{row['name']}: {row['unit']}", *(_figure(cell["seconds"], row) for cell in cells)])
        lines.append([f"times as fast as {baseline}", *(_times(cell["speed"]) for cell in cells)])
        if any("over_floor" in cell for cell in cells):
            lines.append(["over its floor", *(_times(cell.get("over_floor")) for cell in cells)])
        if row["limit"] is not None:
            label = f"over the read limit of {row['limit']['seconds']['median'] * 1e3:.3g} ms"
            lines.append([label, *(_times(cell["over_limit"]) for cell in cells)])
        lines.append([f"bits against {baseline}", *(cell["bits"] for cell in cells)])
    return Table("Speed: median [quartiles]", ["", *names], lines)


def memory_table(document: dict[str, Any]) -> Table:
    """Returns load time and peak memory, each arm in fresh processes."""
    names, weights = document["columns"], document["memory"]["weights"]
    cells = [document["memory"]["columns"][name] for name in names]
    lines = [["loading: s", *(_spread(cell["seconds"], 1.0) for cell in cells)]]
    lines.append([f"times as fast as {document['baseline']}", *(_times(cell["speed"]) for cell in cells)])
    for key, label in (("imports", "imported"), ("loaded", "peak until loaded"), ("peak", "peak of it all")):
        lines.append([f"memory, {label}: MB", *(f"{cell[key]['median'] / 1e6:.0f}" for cell in cells)])
    beyond = [f"{(cell['loaded']['median'] - 1.1 * weights) / 1e6:.0f}" for cell in cells]
    lines.append(["peak until loaded beyond 1.1 times the weights: MB", *beyond])
    return Table(f"Fresh processes; weights of {weights / 1e6:.0f} MB", ["", *names], lines)


def growth_table(document: dict[str, Any]) -> Table:
    """Returns the cost of an incremental build against its length, at up to twelve of the measured lengths."""
    names, growth = document["columns"], document["growth"]
    lines = []
    for at in sorted({round(i * (len(growth["ends"]) - 1) / 11) for i in range(12)}):
        cells = [f"{growth['step_seconds'][n][at] * 1e3:.3g} / {growth['total_seconds'][n][at]:.3g}" for n in names]
        lines.append([str(growth["ends"][at]), f"{growth['cache_bytes'][at] / 1e6:.3g}", *cells])
    return Table("Growth: ms per step there / s in all up to there", ["context", "K/V, MB", *names], lines)


def batch_table(document: dict[str, Any]) -> Table:
    """Returns rates, speed, bits and memory by series and number of rows decoded together."""
    entry, lines = document["batch"], []
    for name, cells in entry["series"].items():
        for size, cell in cells.items():
            rates = [f"{cell['rows_per_minute']:.3g}", f"{cell['tokens_per_second']:.4g}"]
            other = f"differ in {cell['rows_with_other_bits']} rows, the text in {cell['rows_with_other_text']}"
            bits = cell["bits"] if cell["bits"] == "equal" else other
            speeds = [_times(cell["speed"]), _times(cell["speed_over_baseline"])]
            lines.append([name, size, *rates, *speeds, bits, f"{cell['peak_bytes'] / 1e6:.0f}"])
    header = ["", "rows together", "rows per minute", "tokens per second", "times as fast as one at a time"]
    header += [f"as {document['baseline']} one at a time", "bits against one at a time", "peak memory, MB"]
    end = "to the end of its answer" if entry["limit"] is None else f"for {entry['limit']} tokens"
    return Table(f"{entry['rows']} rows decoded together, each from its prompt {end}", header, lines)


def _figure(spread: dict[str, Any], row: dict[str, Any]) -> str:
    if row["unit"] == "tokens/s":
        low, high = spread["quartiles"]
        turned = {"median": 1 / spread["median"], "quartiles": [1 / high, 1 / low]}
        return _spread(turned, float(row["tokens"]), digits=4)
    return _spread(spread, 1e3 if row["unit"] == "ms" else 1.0)


def _spread(spread: dict[str, Any], scale: float, digits: int = 3) -> str:
    values = [scale * value for value in (spread["median"], *spread["quartiles"])]
    median, low, high = (f"{v:.0f}" if v >= 10 ** (digits - 1) else f"{v:.{digits}g}" for v in values)
    return f"{median} [{low}, {high}]"


def _times(spread: dict[str, Any] | None) -> str:
    return "" if spread is None else "{:.2f} [{:.2f}, {:.2f}]".format(spread["median"], *spread["quartiles"])


def batch_figure(document: dict[str, Any]) -> Figure:
    """Returns throughput against the number of rows decoded together, a line per series."""
    series = [
        (name, [(int(size), cell["tokens_per_second"]) for size, cell in cells.items()])
        for name, cells in document["batch"]["series"].items()
    ]
    columns = [(name, {str(size): f"{speed:.4g}" for size, speed in points}) for name, points in series]
    data = column_table("Throughput, tokens/s", "rows together", columns)
    caption = "Throughput against the number of rows decoded together."
    names = ("rows decoded together", "tokens/s of all rows")
    return line_chart("batch", caption, data, series, names)


def growth_figures(document: dict[str, Any]) -> list[Figure]:
    """Returns three drawings over the context length: cost per step, cost so far, memory."""
    growth = document["growth"]
    steps = {name: [seconds * 1e3 for seconds in found] for name, found in growth["step_seconds"].items()}
    held = {"K and V, two copies": [size / 1e6 for size in growth["cache_bytes"]]}
    figures = []
    for name, curves, unit, caption in (
        ("growth-step", steps, "ms per step", "Time of a decode step against its context."),
        ("growth-build", growth["total_seconds"], "s in all", "Time of an incremental build against its length."),
        ("growth-cache", held, "MB", "Memory of the cache against its length."),
    ):
        lines = [[str(end), *(f"{each[at]:.3g}" for each in curves.values())] for at, end in enumerate(growth["ends"])]
        data = Table(f"{caption[:-1]}, {unit}", ["tokens", *curves], lines, folded=True)
        series = [(label, list(zip(growth["ends"], curve))) for label, curve in curves.items()]
        figures.append(line_chart(name, caption, data, series, ("tokens in the cache", unit)))
    return figures
