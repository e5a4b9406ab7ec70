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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.report.summaries import run_report
from experiments.run.directory import Run, RunDirectory, read_finished
from experiments.run.exits import DONE, GATE_FAILED, run_command, say
from experiments.run.ledger import compare_leaves, leaves, row_key, without
from experiments.run.options import SCHEMA, code_sha256
from experiments.run.records import Manifest, Row, RowExtra, Summary
from experiments.run.summary import run_summary
from minimodel.errors import InputError
from minimodel.machine import machine_record

COUNTERPART = {"live": "incremental", "live_replica": "incremental_replica"}
COUNTERPART |= {theirs: mine for mine, theirs in COUNTERPART.items()}
DIGESTS = ("cache_sha256", "logits_sha256")
SECTIONS = ("prefix", "arms", "comparisons")  # of a row; everything else but its place in its own run is "other"
PLACE = ("row", "index", "dtype", "cell", "row_sha256")
SHOWN = 12


@dataclass(frozen=True)
class Ledger:
    """A finished run whose rows can be joined with another's."""

    run: Run
    rows: dict[str, dict[str, Any]]  # by CELL/ID, or DTYPE/ID also where the run has one precision only
    dtype_of: dict[str, str]  # key: dtype

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(self.dtype_of.values()))


def read_ledger_to_join(path: Path) -> Ledger:
    """InputError where the run is missing, unfinished, damaged or contradicts itself."""
    run, _ = read_finished(path)
    rows, dtypes = {}, {}
    for own, row in run.rows.items():
        dtype = str(run.numeric_of(own)["dtype"])
        key = own if "cell" in row else row_key({**row, "dtype": dtype})
        rows[key], dtypes[key] = row, dtype
    return Ledger(run, rows, dtypes)


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


def sections(left: dict[str, Any], right: dict[str, Any], arms: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """Returns {SECTION: (left object, right object)}: the prefix, each arm, of each comparison its cache, its logits
    and the rest, and everything else in the row as "other". A section is named by the left row's arms."""
    found: dict[str, tuple[Any, Any]] = {}
    if "prefix" in left or "prefix" in right:
        found["prefix"] = (left.get("prefix"), right.get("prefix"))
    for mine, theirs in arms.items():
        found[f"arm {mine}"] = (left["arms"][mine], right["arms"][theirs])
    for name, pair in left["comparisons"].items():
        a, b = name.split(":")
        other = right["comparisons"].get(f"{arms.get(a)}:{arms.get(b)}")
        if other is None:
            continue
        for part in ("cache", "logits"):
            if part in pair and part in other:
                found[f"{part} {name}"] = (pair[part], other[part])
        found[f"comparison {name}"] = (without(pair, "cache", "logits"), without(other, "cache", "logits"))
    found["other"] = (without(left, *SECTIONS, *PLACE), without(right, *SECTIONS, *PLACE))
    return found


def _scalars(left: Any, right: Any) -> int:
    """Returns how many scalar leaves both sides have in any row: `first_difference` is one leaf or three."""
    mine, theirs = leaves(left), leaves(right)
    names = [path for path, value in mine.items() if path in theirs and not isinstance(value, list | dict)]
    return sum("first_difference" not in path for path in names)


def audit_row(key: str, dtype: str, index: int, left: dict[str, Any], right: dict[str, Any]) -> Row:
    """Returns one row of the audit: its gates, the leaf counts per section, and the first leaves that differ.

    Gates: `arms` (arms were joined, or neither row is made of arms), `prefix`, `suffix LEFT:RIGHT` (the whole token
    array), `DIGEST LEFT:RIGHT` (injective, of the tensors themselves), and `leaves SECTION`.
    """
    arms = joined_arms(left["arms"], right["arms"])
    armless = not left["arms"] and not right["arms"] and "failure" not in left and "failure" not in right
    gates, counts = {"arms": bool(arms) or armless}, {}
    differing: list[str] = []
    for section, (mine, theirs) in sections(left, right, arms).items():
        found = compare_leaves(mine, theirs)
        counts[section] = {
            "shared": found.shared,
            "scalars": _scalars(mine, theirs),
            "unshared": len(found.one_sided),
        }
        gates["prefix" if section == "prefix" else f"leaves {section}"] = found.shared > 0 and not found.differing
        differing += [f"{section} {one.path}" for one in found.differing]
    for mine, theirs in arms.items():
        a, b = left["arms"][mine], right["arms"][theirs]
        for field in ("suffix", *DIGESTS):
            if field in a and field in b:
                gates[f"{field} {mine}:{theirs}"] = a[field] == b[field]
    identity: RowExtra = {"cell": left["cell"]} if "cell" in left else {"dtype": dtype}
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
