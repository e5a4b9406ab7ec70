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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from experiments.report.summaries import run_report
from experiments.run.directory import Run, RunDirectory, read_finished
from experiments.run.exits import DONE, GATE_FAILED, as_command, say
from experiments.run.ledger import compare_leaves, row_key, without
from experiments.run.options import FRESH, PATH, SCHEMA, code_sha256
from experiments.run.records import Manifest, Row, RowExtra, Summary
from experiments.run.summary import run_summary
from minimodel.errors import InputError
from minimodel.machine import machine_record

COUNTERPART = {"live": "incremental", "live_replica": "incremental_replica"}
COUNTERPART |= {theirs: mine for mine, theirs in COUNTERPART.items()}
DIGESTS = ("cache_sha256", "logits_sha256")
SECTIONS = ("prefix", "arms", "comparisons")  # of a row; everything else but its place in its own run is "other"
PLACE = ("row", "index", "dtype", "cell", "row_sha256")
SURFACE = ("environment", "checkpoint", "tasks_sha256", "code_sha256", "caps", "visibility", "role_offset")
SHOWN = 12
Rows = dict[str, dict[str, Any]]


def rows_to_join(run: Run) -> Rows:
    """Returns each row with its dtype, by CELL/ID or DTYPE/ID, also where the run has one precision only."""
    rows = [{**row, "dtype": str(run.numeric_of(key)["dtype"])} for key, row in run.rows.items()]
    return {row_key(row): row for row in rows}


def joined_arms(left: dict[str, Any], right: dict[str, Any]) -> dict[str, str]:
    """Returns {arm of the left row: arm of the right row}: the same name; otherwise live is joined with incremental
    where each side has only one of the two."""
    pairs = {}
    for name in left:
        other = COUNTERPART.get(name)
        if name in right:
            pairs[name] = name
        elif other in right and other not in left:
            pairs[name] = str(other)
    return pairs


def sections(left: dict[str, Any], right: dict[str, Any], arms: dict[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (section, left object, right object): the prefix, each arm, of each comparison its cache, its logits and
    the rest, and everything else in the row as "other". A section is named by the left row's arms."""
    if "prefix" in left or "prefix" in right:
        yield "prefix", left.get("prefix"), right.get("prefix")
    for mine, theirs in arms.items():
        yield f"arm {mine}", left["arms"][mine], right["arms"][theirs]
    for name, pair in left["comparisons"].items():
        other = right["comparisons"].get(":".join(str(arms.get(arm)) for arm in name.split(":")))
        if other is not None:
            for part in ("cache", "logits"):
                if part in pair and part in other:
                    yield f"{part} {name}", pair[part], other[part]
            yield f"comparison {name}", without(pair, "cache", "logits"), without(other, "cache", "logits")
    yield "other", without(left, *SECTIONS, *PLACE), without(right, *SECTIONS, *PLACE)


def audit_row(index: int, left: dict[str, Any], right: dict[str, Any]) -> Row:
    """Returns one row of the audit: its gates, the leaf counts per section, and the first leaves that differ.

    Gates: `arms` (arms were joined, or neither row is made of arms), `prefix`, `suffix LEFT:RIGHT` (the whole token
    array), `DIGEST LEFT:RIGHT` (injective, of the tensors themselves), and `leaves SECTION`.
    """
    arms = joined_arms(left["arms"], right["arms"])
    armless = not left["arms"] and not right["arms"] and "failure" not in left and "failure" not in right
    gates, counts, differing = {"arms": bool(arms) or armless}, {}, []
    for section, mine, theirs in sections(left, right, arms):
        found = compare_leaves(mine, theirs)
        scalars = [one.path for one in found.shared if not isinstance(one.left, list | dict)]
        counts[section] = {
            "shared": len(found.shared),
            # in any row: `first_difference` is one leaf or three
            "scalars": sum("first_difference" not in path for path in scalars),
            "unshared": len(found.one_sided),
        }
        holds = bool(found.shared) and not found.differing
        gates["prefix" if section == "prefix" else f"leaves {section}"] = holds
        differing += [f"{section} {one.path}" for one in found.differing]
    for mine, theirs in arms.items():
        a, b = left["arms"][mine], right["arms"][theirs]
        fields = [field for field in ("suffix", *DIGESTS) if field in a and field in b]
        gates |= {f"{field} {mine}:{theirs}": a[field] == b[field] for field in fields}
    identity: RowExtra = {"cell": left["cell"]} if "cell" in left else {"dtype": left["dtype"]}
    return {
        "row": left["row"],
        **identity,
        "index": index,
        "left_row_sha256": left["row_sha256"],
        "right_row_sha256": right["row_sha256"],
        "joined": arms,
        "leaves": counts,
        "differing": differing[:SHOWN],
        "differing_leaves": len(differing),
        "arms": {},
        "comparisons": {},
        "gates": gates,
        "passed": all(gates.values()),
    }


def audit(left: Run, right: Run) -> tuple[list[Row], Summary]:
    """Returns the audit's rows, in the left run's order, and its summary, whose `gates` count each check over the
    joined rows. InputError when the runs share no precision or no row."""
    sides = rows_to_join(left), rows_to_join(right)
    precisions = [list(dict.fromkeys(row["dtype"] for row in side.values())) for side in sides]
    dtypes = [dtype for dtype in precisions[0] if dtype in precisions[1]]
    if not dtypes:
        wanted, found = (" ".join(names) for names in precisions)
        raise InputError(f"{right.path}: expected a precision of {left.path} ({wanted}), found {found}")
    keys = [[key for key, row in side.items() if row["dtype"] in dtypes] for side in sides]
    both = [key for key in keys[0] if key in sides[1]]
    if not both:
        raise InputError(f"{right.path}: expected rows of {left.path}, found none of them")
    rows = [audit_row(index, sides[0][key], sides[1][key]) for index, key in enumerate(both)]
    order = both == [key for key in keys[1] if key in sides[0]]
    only = [[key for key in side if key not in sides[1 - i]] for i, side in enumerate(keys)]
    head = run_summary("audit", "-".join(dtypes), rows, {})
    return rows, {
        **head,
        "passed": head["passed"] and order and not only[0] and not only[1],
        "left": _side(left),
        "right": _side(right),
        "only_left": only[0],
        "only_right": only[1],
        "order_equal": order,
        "joined": {mine: theirs for row in rows for mine, theirs in row["joined"].items()},
        "leaves": leaf_spans(rows),
        "not_joined": [dtype for dtype in dict.fromkeys([*precisions[0], *precisions[1]]) if dtype not in dtypes],
        "surface": surface_differences(left, right, dtypes),
    }


def leaf_spans(rows: list[Row]) -> dict[str, Any]:
    """Returns {SECTION: {shared: [min, max], scalars: [min, max], unshared: max}} over the rows that have it."""
    spans = {}
    for section in dict.fromkeys(section for row in rows for section in row["leaves"]):
        counts = [row["leaves"][section] for row in rows if section in row["leaves"]]
        values = {kind: [one[kind] for one in counts] for kind in ("shared", "scalars", "unshared")}
        ranges = {kind: [min(values[kind]), max(values[kind])] for kind in ("shared", "scalars")}
        spans[section] = {**ranges, "unshared": max(values["unshared"])}
    return spans


def _side(run: Run) -> dict[str, Any]:
    return {"experiment": run.experiment, "rows": len(run.rows), "ledger_sha256": run.ledger_sha256}


def surface_differences(left: Run, right: Run, dtypes: list[str]) -> list[str]:
    """Returns one line per difference of the two manifests in numerics, versions, checkpoint, tasks, contract, code."""
    sides: list[dict[str, Any]] = []
    for run in (left, right):
        contracts = [one for one in run.manifest["numeric"] if one["dtype"] in dtypes]
        # by dtype where each has one contract, so that a run of one precision meets the same precision of a crossing
        named = {one["dtype"]: one for one in contracts}
        numeric = named if len(named) == len(contracts) else {str(i): one for i, one in enumerate(contracts)}
        sides.append({"numeric": numeric, **{key: run.manifest.get(key) for key in SURFACE}})
    return compare_leaves(sides[0], sides[1]).lines("left", "right")


def audit_lines(summary: Summary) -> list[str]:
    """Returns one line per check, what differs, and the verdict."""
    lines = []
    for name, counts in summary["gates"].items():
        section = summary["leaves"].get(name.removeprefix("leaves "))
        span = "" if section is None else f"  ({'-'.join(map(str, dict.fromkeys(section['shared'])))} leaves per row)"
        lines.append(f"{counts['passed']}/{counts['of']}  {name}{span}")
    only = {"left": summary["only_left"], "right": summary["only_right"]}
    lines += [f"rows of the {side} run alone: {len(k)}, {' '.join(k[:SHOWN])}" for side, k in only.items() if k]
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


def write_audit(
    out: Path, left: Run, right: Run, rows: list[Row], summary: Summary, started: float, fresh: bool
) -> None:
    """Writes the audit as a run directory with the left run's numeric contracts and checkpoint. Rows that an earlier
    audit of the same runs wrote there are kept.
    """
    manifest: Manifest = {
        "schema": SCHEMA,
        "experiment": "audit",
        "numeric": left.manifest["numeric"],
        "environment": machine_record(),
        "checkpoint": left.manifest["checkpoint"],
        "code_sha256": code_sha256(),
        "left": _side(left),
        "right": _side(right),
        "row_order": [row_key(row) for row in rows],
        "information": {"left": str(left.path), "right": str(right.path)},
    }
    directory = RunDirectory(out, manifest, fresh)
    try:
        for row in rows[len(directory.rows) :]:
            seconds = round(time.monotonic() - started, 4)
            directory.append(row, {"row": row_key(row), "seconds_since_start": seconds})
        directory.finish(summary, run_report(manifest, summary))
    finally:
        directory.close()


@click.command(help=__doc__)
@click.argument("left", metavar="A", type=PATH)
@click.argument("right", metavar="B", type=PATH)
@click.option("--out", type=PATH, metavar="DIR", help="Also write the audit as a run directory.")
@FRESH
@as_command("experiments.audit", resumes=True)
def main(left: Path, right: Path, out: Path | None, fresh: bool) -> int:
    started = time.monotonic()
    sides = read_finished(left)[0], read_finished(right)[0]
    rows, summary = audit(*sides)
    if out is not None:
        write_audit(out, *sides, rows, summary, started, fresh)
    for line in audit_lines(summary):
        say(line)
    return DONE if summary["passed"] else GATE_FAILED


if __name__ == "__main__":
    main()
