"""Are two computations of the same thing equal bit for bit, and if not, where do they first differ, and why?

A and B are two run directories, two boundary files or two trace files, ours or written by the transformers recorder.
Differences of the environment come first, then a verdict per row; a differing row is explained: the first differing
step in forward order with both values, and the named attention kernel under which our own code has each side's bits.

Exit code 0: equal. 2: the two cannot be compared (another checkpoint, contract, dtype or token list), or bad input.
3: different.

    python -m experiments.crosscheck runs/ours runs/theirs

where `experiments.matrix --kernels packed_gqa` made the first and `tests.hf.record`, with transformers 5.23 or later,
the second; earlier releases have the bits of `--kernels repeat_kv`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from experiments.crosscheck import compare
from experiments.crosscheck.explain import Rerun, explain_files, explain_row
from experiments.run.directory import INFORMATION, Run, read_run
from experiments.run.exits import DONE, GATE_FAILED, as_command, say
from experiments.run.ledger import compare_leaves, without
from experiments.run.options import PATH
from minimodel.errors import InputError, refuse

SEAL = "row_sha256"  # of a row: it follows from the rest
SHOWN = 6  # lines of a kind, before "and N more"


def crosscheck_files(left: Path, right: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Returns the report on two boundary or trace files."""
    pair = compare.compare_files(left, right)
    mine, theirs = pair.left.header, pair.right.header
    findings = []
    if not pair.equal:
        rerun = None if checkpoint is None else Rerun.of(checkpoint, mine["checkpoint"], mine["numeric"])
        findings = [explain_files(pair, rerun).as_dict()]
    return {
        "kind": pair.kind,
        "left": str(left),
        "right": str(right),
        "environment": compare.environment_differences(mine, theirs),
        "equal": pair.equal,
        "verdict": f"{pair.steps} tensors compared, {pair.differing_steps} differ",
        "rows": [],
        "findings": {mine["row"]: findings},
    }


def crosscheck_runs(left: Path, right: Path, checkpoint: Path | None, rerun: bool, explain: int) -> dict[str, Any]:
    """Returns the report on two run directories. `checkpoint` None: the one at the recorded path, if it exists."""
    runs = read_run(left), read_run(right)
    names = compare.require_comparable(*runs)
    pairs = {row: compare_leaves(without(runs[0].rows[row], SEAL), without(runs[1].rows[row], SEAL)) for row in names}
    differing = [row for row, pair in pairs.items() if not pair.equal]
    again, note = _rerun(runs, checkpoint) if rerun and differing else (None, [])
    findings = {
        row: explain_row(*runs, row, again and replace(again, numeric=runs[0].numeric_of(row)))
        for row in differing[:explain]
    }
    only = {letter: [row for row in run.rows if row not in names] for letter, run in zip(compare.LETTERS, runs)}
    rows: list[dict[str, Any]] = [
        {
            "row": row,
            "equal": found.equal,
            "fields": len(found.shared) - len(found.differing),
            "differing": [one.line(*compare.LETTERS) for one in found.differing],
            "one_sided": [one.line(*compare.LETTERS) for one in found.one_sided],
        }
        for row, found in pairs.items()
    ]
    fields = sum(row["fields"] for row in rows)
    verdict = [f"{len(pairs) - len(differing)} of {len(pairs)} common rows equal, {fields} fields equal"]
    verdict += [f"{len(own)} rows only in {side}: {' '.join(own[:SHOWN])}" for side, own in only.items() if own]
    return {
        "kind": "run",
        "left": str(left),
        "right": str(right),
        "environment": compare.run_environment(*runs) + note,
        "equal": not differing and not any(only.values()),
        "verdict": "; ".join(verdict),
        "rows": rows,
        "findings": {row: [finding.as_dict() for finding in found] for row, found in findings.items()},
    }


def _rerun(runs: tuple[Run, Run], given: Path | None) -> tuple[Rerun | None, list[str]]:
    """Returns the checkpoint to rerun, or None and a note why. A given one that does not fit is refused."""
    numeric, digests = runs[0].manifest["numeric"][0], runs[0].manifest.get("checkpoint", {})
    if given is not None:
        return Rerun.of(given, digests, numeric), []
    paths = [Path(str(run.manifest.get(INFORMATION, {}).get("checkpoint", ""))) for run in runs]
    for path in (path for path in paths if path.is_dir() and path.name):
        try:
            return Rerun.of(path, digests, numeric), []
        except InputError as error:
            return None, [f"not computed again: {error}"]
    return None, ["not computed again: the recorded checkpoint is not here; pass --checkpoint"]


def print_report(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report: environment, rows, explanations, verdict."""
    say(f"A: {report['left']}\nB: {report['right']}")
    for line in report["environment"]:
        say(f"environment: {line.removeprefix('environment.')}")
    explained = report["findings"]
    for row in report["rows"]:
        faults = [f"  {line}" for line in row["differing"] + row["one_sided"]]
        if faults:
            more = [f"  and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
            shown = [*faults[:SHOWN], *more] if row["row"] in explained else faults[:1]
            say("\n".join([f"row {row['row']}: differs in {len(faults)} fields", *shown]))
        elif not quiet:
            say(f"row {row['row']}: equal ({row['fields']} fields)")
    for row, findings in explained.items():
        for finding in findings:
            for line in finding["lines"]:
                say(f"{'row ' + row + ': ' if row else ''}{line}")
    say(f"{'equal' if report['equal'] else 'different'}: {report['verdict']}")


@click.command(help=__doc__)
@click.argument("left", metavar="A", type=PATH)
@click.argument("right", metavar="B", type=PATH)
@click.option(
    "--checkpoint",
    type=PATH,
    default=None,
    metavar="DIR",
    help="Compute a differing construction again with it. [default for runs: the recorded one]",
)
@click.option("--no-rerun", is_flag=True, help="Compute nothing again.")
@click.option(
    "--explain", default=1, show_default=True, type=click.IntRange(min=0), metavar="N", help="Explain N differing rows."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the lines.")
@click.option("--quiet", is_flag=True, help="No line for rows that are equal.")
@as_command("experiments.crosscheck")
def main(
    left: Path, right: Path, checkpoint: Path | None, no_rerun: bool, explain: int, as_json: bool, quiet: bool
) -> int:
    if no_rerun and checkpoint is not None:
        raise InputError("--no-rerun: expected no --checkpoint beside it, found one")
    if left.is_dir() and right.is_dir():
        report = crosscheck_runs(left, right, checkpoint, not no_rerun, explain)
    elif left.is_file() and right.is_file():
        report = crosscheck_files(left, right, checkpoint)
    else:
        kinds = ["a directory" if p.is_dir() else "a file" if p.is_file() else "nothing" for p in (left, right)]
        raise refuse("A and B", "two run directories or two files", " and ".join(kinds))
    if as_json:
        click.echo(json.dumps(report, indent=1, allow_nan=False))
    else:
        print_report(report, quiet)
    return DONE if report["equal"] else GATE_FAILED


if __name__ == "__main__":
    main()
