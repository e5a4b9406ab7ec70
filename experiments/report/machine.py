"""The table of machine.json: what holds on a machine, for a terminal and for the report."""

from pathlib import Path
from typing import Any

from experiments.report.blocks import Table, table
from minimodel.errors import refuse
from minimodel.files import read_json_object

SCHEMA, FILE = "stage-replay-machine-v1", "machine.json"
HEADER = ["dtype", "attention", "linear", "copies equal", "rows together", "packed = plain at"]
HEADER += ["prefill = incremental", "step, ms"]


def machine_rows(document: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of each row under `HEADER`; a row that cannot be run says so in place of its checks."""
    rows = []
    for one in document["rows"]:
        names = [one["dtype"], one["attention"], one["linear"]]
        if "refused" in one:
            rows.append([*names, "not available", "", "", "", ""])
            continue
        counts = one["packed_equals_plain_at"]
        rows.append(
            [
                *names,
                "yes" if one["copies_equal"] else "NO",
                f"{one['rows_together']} of {one['rows_tried']}",
                "" if counts is None else _counts(counts, one["packed_tried_at"]),
                "yes" if one["invariant"] else "no",
                f"{one['step_seconds'] * 1e3:.2f}",
            ]
        )
    return rows


def _counts(found: list[int], tried: list[int]) -> str:
    return f"all {len(tried)} tried, to {tried[-1]}" if found == tried else ", ".join(map(str, found)) or "none"


def machine_head(document: dict[str, Any]) -> str:
    """Returns one sentence on the machine, its libraries and how busy it was."""
    record = document["environment"]
    return (
        f"{record['cpu']}, {record['cpu_capability']}, {document['cores']} cores, load {document['load']}; "
        f"torch {record['torch']}, device {document['device']}, {document['threads']} threads; "
        f"memory read {document['read_gigabytes_per_second']:.1f} GB/s"
    )


def machine_lines(document: dict[str, Any]) -> list[str]:
    """Returns the table as aligned lines, then the reasons for what is not available or does not hold for copies."""
    rows = [HEADER, *machine_rows(document)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [machine_head(document), ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    notes = {}
    for one in document["rows"]:
        name = f"{one['dtype']} {one['attention']}/{one['linear']}"
        if "refused" in one:
            notes[name] = one["refused"]
        elif not one["copies_equal"]:
            notes[name] = one["reasons"][0]
    return [*lines, "", *(f"{name}: {text}" for name, text in notes.items())]


def machine_table(path: Path) -> Table:
    """Returns the report's table of a machine.json. InputError when the file is none."""
    document = read_json_object(path)
    if document.get("schema") != SCHEMA:
        raise refuse(f"{path}: schema", repr(SCHEMA), document.get("schema"))
    return table(f"What holds on the machine: {machine_head(document)}", HEADER, machine_rows(document))
