"""Compare two finished runs A and B of any experiments without decoding: join their ledgers by row and compare
prefixes, suffix arrays, comparison objects, every leaf that both schemas share, and tensor digests (paper, section
3.5).

Where A has `live` arms and B `incremental` ones, or the reverse, these are joined: the audit then compares the
reconstruction with the trajectory and the tensors of ordinary decoding. Runs of several precisions are joined on those
they share; a precision of one run alone is named. Exit code 3 on any disagreement, including a row that only one run
has.

    python -m experiments.audit runs/matrix-bf16 runs/fixed_prefix-bf16-fp32
"""

import time
from pathlib import Path
from typing import Any

import click

from experiments.harness.exits import DONE, GATE_FAILED, run_command, say
from experiments.harness.joining import SHOWN, Ledger, audit_row, read_ledger_to_join
from experiments.harness.leaves import compare_leaves
from experiments.harness.ledger import row_key
from experiments.harness.manifest import SCHEMA, code_sha256
from experiments.harness.records import Manifest, Row, Summary
from experiments.harness.rundir import RunDirectory
from experiments.harness.summary import run_summary
from experiments.report.sections import run_report
from minimodel.errors import InputError
from minimodel.machine import machine_record

SURFACE = ("environment", "checkpoint", "tasks_sha256", "code_sha256", "caps", "visibility", "role_offset")


def audit(left: Ledger, right: Ledger) -> tuple[list[Row], Summary]:
    """The audit's rows, in the left run's order, and its summary. InputError when the runs share no precision."""
    dtypes = [dtype for dtype in left.dtypes if dtype in right.dtypes]
    if not dtypes:
        raise InputError(
            f"{right.run.path}: expected a precision of {left.run.path} ({' '.join(left.dtypes)}), "
            f"found {' '.join(right.dtypes)}"
        )
    keys = [[key for key in side.rows if side.dtype_of[key] in dtypes] for side in (left, right)]
    both = [key for key in keys[0] if key in right.rows]
    if not both:
        raise InputError(f"{right.run.path}: expected rows of {left.run.path}, found none of them")
    rows = [audit_row(key, left.dtype_of[key], i, left.rows[key], right.rows[key]) for i, key in enumerate(both)]
    return rows, audit_summary(left, right, dtypes, keys, rows)


def audit_summary(left: Ledger, right: Ledger, dtypes: list[str], keys: list[list[str]], rows: list[Row]) -> Summary:
    """Returns the head, whose `gates` count each check over the joined rows, and what one run alone has."""
    present = set(keys[0]) & set(keys[1])
    only = [[key for key in side if key not in present] for side in keys]
    order = [key for key in keys[0] if key in present] == [key for key in keys[1] if key in present]
    sections: dict[str, list[dict[str, int]]] = {}
    for row in rows:
        for section, counts in row["leaves"].items():
            sections.setdefault(section, []).append(counts)
    spans = {
        section: {
            "shared": [min(c["shared"] for c in counts), max(c["shared"] for c in counts)],
            "scalars": [min(c["scalars"] for c in counts), max(c["scalars"] for c in counts)],
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
        "not_joined": [dtype for dtype in dict.fromkeys([*left.dtypes, *right.dtypes]) if dtype not in dtypes],
        "surface": surface_differences(left.run.manifest, right.run.manifest, dtypes),
    }


def _side(ledger: Ledger) -> dict[str, Any]:
    return {"experiment": ledger.run.experiment, "rows": len(ledger.rows), "ledger_sha256": ledger.run.ledger_sha256}


def surface_differences(left: dict[str, Any], right: dict[str, Any], dtypes: list[str]) -> list[str]:
    """Returns one line per difference of the two manifests in numerics, versions, checkpoint, tasks, contract, code."""
    sides: list[dict[str, Any]] = []
    for manifest in (left, right):
        contracts = [one for one in manifest["numeric"] if one["dtype"] in dtypes]
        # by dtype where each has one contract, so that a run of one precision meets the same precision of a crossing
        named = {one["dtype"]: one for one in contracts}
        numeric = named if len(named) == len(contracts) else {str(i): one for i, one in enumerate(contracts)}
        sides.append({"numeric": numeric, **{key: manifest.get(key) for key in SURFACE}})
    return compare_leaves(sides[0], sides[1]).lines("left", "right")


def audit_lines(summary: Summary) -> list[str]:
    """The check-by-check table for stdout, what differs, and the verdict."""
    lines = []
    for name, counts in summary["gates"].items():
        section = summary["leaves"].get(name.removeprefix("leaves "))
        span = "" if section is None else f"  ({'-'.join(map(str, dict.fromkeys(section['shared'])))} leaves a row)"
        lines.append(f"{counts['passed']}/{counts['of']}  {name}{span}")
    for side, only in (("left", summary["only_left"]), ("right", summary["only_right"])):
        if only:
            lines.append(f"rows of the {side} run alone: {len(only)}, {' '.join(only[:SHOWN])}")
    if not summary["order_equal"]:
        lines.append("the two runs hold their common rows in different orders")
    if summary["not_joined"]:
        lines.append(f"note, not joined, for only one run has them: {' '.join(summary['not_joined'])}")
    lines += [f"note, the numeric surfaces differ: {line}" for line in summary["surface"]]
    if summary["failed_rows"]:
        lines.append(f"rows that disagree: {' '.join(summary['failed_rows'][:SHOWN])}")
    agree = summary["rows"] - len(summary["failed_rows"])
    verdict = "agree" if summary["passed"] else "DISAGREE"
    return [*lines, f"audit {summary['dtype']}: {agree}/{summary['rows']} rows agree; the runs {verdict}"]


def write_audit(out: Path, left: Ledger, right: Ledger, rows: list[Row], summary: Summary, started: float) -> None:
    """Writes the audit as a run directory with the left run's numeric contracts and checkpoint. Rows that an earlier
    audit of the same runs wrote there are kept.
    """
    manifest: Manifest = {
        "schema": SCHEMA,
        "experiment": "audit",
        "numeric": left.run.manifest["numeric"],
        "environment": machine_record(),
        "checkpoint": left.run.manifest["checkpoint"],
        "code_sha256": code_sha256(),
        "left": _side(left),
        "right": _side(right),
        "row_order": [row_key(row) for row in rows],
        "information": {"left": str(left.run.path), "right": str(right.run.path)},
    }
    directory = RunDirectory(out, manifest, fresh=False)
    try:
        for row in rows[len(directory.rows) :]:
            seconds = round(time.monotonic() - started, 4)
            directory.append(row, {"row": row_key(row), "seconds_since_start": seconds})
        directory.finish(summary, run_report({**manifest}, {**summary}))
    finally:
        directory.close()


@click.command(help=__doc__)
@click.argument("left", metavar="A", type=click.Path(path_type=Path))
@click.argument("right", metavar="B", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Also write the audit as a run directory.")
def main(left: Path, right: Path, out: Path | None) -> None:
    def body() -> int:
        started = time.monotonic()
        sides = read_ledger_to_join(left), read_ledger_to_join(right)
        rows, summary = audit(*sides)
        if out is not None:
            write_audit(out, *sides, rows, summary, started)
        for line in audit_lines(summary):
            say(line)
        return DONE if summary["passed"] else GATE_FAILED

    run_command(body, "experiments.audit")


if __name__ == "__main__":
    main()
