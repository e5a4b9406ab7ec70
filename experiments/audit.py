"""Audit two finished runs A and B against one another, without decoding: join their ledgers by row and compare
prefixes, suffix arrays, comparison objects, every leaf that both schemas share, and tensor digests (paper, section
3.5).

Where A has `live` arms and B `incremental` ones, or the reverse, these are joined: the audit then asks whether the
reconstruction met the trajectory and the tensors of ordinary decoding. Runs of several precisions are joined on those
they share. Exit code 3 on any disagreement, rows that only one run has among them.

    python -m experiments.audit runs/matrix-bf16 runs/fixed_prefix-bf16-fp32
"""

import time
from pathlib import Path
from typing import Any

import click

from experiments.harness.exits import DONE, GATE_FAILED, run_command
from experiments.harness.joining import SHOWN, Ledger, audit_row, read_run
from experiments.harness.manifest import SCHEMA, code_sha256
from experiments.harness.markdown import table
from experiments.harness.rundir import INFORMATION, RunDirectory, differing_fields
from experiments.harness.summary import run_summary
from minimodel.errors import InputError
from minimodel.numerics import environment

SURFACE = ("environment", "checkpoint", "tasks_sha256", "code_sha256", "caps", "visibility", "role_offset")


def audit(left: Ledger, right: Ledger) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The audit's rows, in the left run's order, and its summary. InputError when the runs share no precision."""
    dtypes = [dtype for dtype in left.dtypes if dtype in right.dtypes]
    if not dtypes:
        raise InputError(
            f"{right.path}: expected a precision of {left.path} ({' '.join(left.dtypes)}), "
            f"found {' '.join(right.dtypes)}"
        )
    keys = [[key for key in side.rows if key[0] in dtypes] for side in (left, right)]
    both = [key for key in keys[0] if key in right.rows]
    if not both:
        raise InputError(f"{right.path}: expected rows of {left.path}, found none of them")
    rows = [audit_row(key, i, left.rows[key], right.rows[key]) for i, key in enumerate(both)]
    return rows, audit_summary(left, right, dtypes, keys, rows)


def audit_summary(
    left: Ledger, right: Ledger, dtypes: list[str], keys: list[list[tuple[str, str]]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The head, whose `gates` count each check over the joined rows; `left`, `right`; `only_left`, `only_right` (rows
    of one run alone); `order_equal`; `joined` {LEFT ARM: RIGHT ARM}; `leaves` {SECTION: {shared: [min, max],
    unshared}}; `surface`: what differs between the two numeric surfaces, told and not judged."""
    present = set(keys[0]) & set(keys[1])
    only = [[f"{dtype}/{row}" for dtype, row in side if (dtype, row) not in present] for side in keys]
    order = [key for key in keys[0] if key in present] == [key for key in keys[1] if key in present]
    sections: dict[str, list[dict[str, int]]] = {}
    for row in rows:
        for section, counts in row["leaves"].items():
            sections.setdefault(section, []).append(counts)
    spans = {
        section: {
            "shared": [min(c["shared"] for c in counts), max(c["shared"] for c in counts)],
            "unshared": max(c["unshared"] for c in counts),
        }
        for section, counts in sections.items()
    }
    head = run_summary("audit", "-".join(dtypes), rows, {})
    return {
        **head,
        "passed": head["passed"] and order and not only[0] and not only[1],
        "left": _side(left),
        "right": _side(right),
        "only_left": only[0],
        "only_right": only[1],
        "order_equal": order,
        "joined": {mine: theirs for row in rows for mine, theirs in row["joined"].items()},
        "leaves": spans,
        "surface": surface_differences(left.manifest, right.manifest, dtypes),
    }


def _side(ledger: Ledger) -> dict[str, Any]:
    return {"experiment": ledger.manifest["experiment"], "rows": len(ledger.rows), "ledger_sha256": ledger.sha256}


def surface_differences(left: dict[str, Any], right: dict[str, Any], dtypes: list[str]) -> list[str]:
    """What the two manifests say differently about numerics, versions, checkpoint, tasks, contract and code."""
    sides: list[dict[str, Any]] = []
    for manifest in (left, right):
        numeric = {one["dtype"]: one for one in manifest["numeric"] if one["dtype"] in dtypes}
        sides.append({"numeric": numeric, **{key: manifest.get(key) for key in SURFACE}})
    return [
        line.replace("expected ", "left ").replace("found ", "right ") for line in differing_fields(sides[0], sides[1])
    ]


def audit_lines(summary: dict[str, Any]) -> list[str]:
    """The check-by-check table for stdout, what differs, and the verdict."""
    lines = []
    for name, counts in summary["gates"].items():
        section = summary["leaves"].get(name.removeprefix("leaves "))
        span = "" if section is None else f"  ({'-'.join(map(str, dict.fromkeys(section['shared'])))} leaves a row)"
        lines.append(f"{counts['passed']}/{counts['of']}  {name}{span}")
    for side in ("left", "right"):
        only = summary[f"only_{side}"]
        if only:
            lines.append(f"rows of the {side} run alone: {len(only)}, {' '.join(only[:SHOWN])}")
    if not summary["order_equal"]:
        lines.append("the two runs hold their common rows in different orders")
    lines += [f"note, the numeric surfaces differ: {line}" for line in summary["surface"]]
    if summary["failed_rows"]:
        lines.append(f"rows that disagree: {' '.join(summary['failed_rows'][:SHOWN])}")
    agree = summary["rows"] - len(summary["failed_rows"])
    verdict = "agree" if summary["passed"] else "DISAGREE"
    return [*lines, f"audit {summary['dtype']}: {agree}/{summary['rows']} rows agree; the runs {verdict}"]


def audit_report(summary: dict[str, Any]) -> str:
    """report.md: the same checks as a table."""
    gates = [(name, f"{c['passed']}/{c['of']}") for name, c in summary["gates"].items()]
    leaves = [
        (section, "-".join(map(str, dict.fromkeys(span["shared"]))), span["unshared"])
        for section, span in summary["leaves"].items()
    ]
    return (
        "\n\n".join(
            [
                f"# audit, {summary['dtype']}",
                f"{summary['left']['experiment']} (`{summary['left']['ledger_sha256']}`) against "
                f"{summary['right']['experiment']} (`{summary['right']['ledger_sha256']}`).",
                audit_lines(summary)[-1] + ".",
                table(["check", "rows that agree"], gates),
                table(["section", "leaves that both schemas share", "of one schema alone"], leaves),
                *(f"The numeric surfaces differ: {line}." for line in summary["surface"]),
            ]
        )
        + "\n"
    )


def write_audit(
    out: Path, left: Ledger, right: Ledger, rows: list[dict[str, Any]], summary: dict[str, Any], started: float
) -> None:
    """A run directory like any other's, its numeric contract and checkpoint the left run's; the same audit again finds
    its rows there and keeps them.
    """
    manifest = {
        "schema": SCHEMA,
        "experiment": "audit",
        "numeric": left.manifest["numeric"],
        "environment": environment(),
        "checkpoint": left.manifest["checkpoint"],
        "code_sha256": code_sha256(),
        "left": _side(left),
        "right": _side(right),
        "row_order": [f"{row['dtype']}/{row['row']}" for row in rows],
        INFORMATION: {"left": str(left.path), "right": str(right.path)},
    }
    directory = RunDirectory(out, manifest, fresh=False)
    try:
        for row in rows[len(directory.rows) :]:
            seconds = round(time.monotonic() - started, 4)
            directory.append(row, {"row": f"{row['dtype']}/{row['row']}", "seconds_since_start": seconds})
        directory.finish(summary, audit_report(summary))
    finally:
        directory.close()


@click.command(help=__doc__)
@click.argument("left", metavar="A", type=click.Path(path_type=Path))
@click.argument("right", metavar="B", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Also write the audit as a run directory.")
def main(left: Path, right: Path, out: Path | None) -> None:
    def body() -> int:
        started = time.monotonic()
        sides = read_run(left), read_run(right)
        rows, summary = audit(*sides)
        if out is not None:
            write_audit(out, *sides, rows, summary, started)
        for line in audit_lines(summary):
            click.echo(line)
        return DONE if summary["passed"] else GATE_FAILED

    run_command(body, "experiments.audit")


if __name__ == "__main__":
    main()
