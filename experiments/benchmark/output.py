"""What a benchmark writes: benchmark.json, and a report with its tables and drawings."""

import json
from pathlib import Path
from typing import Any

from experiments.benchmark.batch import batch_figure, batch_table
from experiments.benchmark.growth import growth_figures
from experiments.benchmark.tables import growth_table, memory_table, speed_table
from experiments.report.blocks import Alert, Block, Paragraph, Report, Table, Verdict
from experiments.report.markdown import markdown_table
from experiments.report.write import write_report
from experiments.run.directory import require_own, set_aside
from experiments.run.ledger import write_whole
from minimodel.errors import InputError

DOCUMENT = "benchmark.json"
KEYS = ("schema", "machine")  # what tells a benchmark from other people's files


def check(directory: Path, fresh: bool) -> None:
    """InputError where files stand that would not be set aside; writes nothing."""
    if fresh and directory.exists():
        require_own(directory, DOCUMENT, KEYS)
    elif directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory}: expected an empty directory, found files; choose --out or --fresh")


def write(document: dict[str, Any], directory: Path) -> None:
    """benchmark.json, report.md, report.html and the drawings; an earlier benchmark is set aside."""
    if directory.exists() and any(directory.iterdir()):
        set_aside(directory, DOCUMENT, KEYS)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    write_whole(directory / DOCUMENT, text + "\n")
    write_report(report(document), directory)


def report(document: dict[str, Any]) -> Report:
    """The report's blocks."""
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
    """The tables of what was measured."""
    found = [speed_table(document)] if document["rows"] else []
    found += [memory_table(document)] if "memory" in document else []
    found += [batch_table(document)] if "batch" in document else []
    return found + ([growth_table(document)] if "growth" in document else [])


def described(document: dict[str, Any]) -> list[str]:
    """Machine, contract, checkpoint and what was left out, in sentences."""
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
    """One sentence a broken promise."""
    return [f"{row}: {a} has other bits than {b}" for row, a, b in document["broken_promises"]]


def printed(document: dict[str, Any]) -> str:
    """The same tables for the terminal."""
    parts = ["\n".join(described(document)), *map(markdown_table, tables(document))]
    return "\n\n".join([*parts, *broken(document)])
