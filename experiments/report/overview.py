"""The page's first and last sections: the runs at a glance, their environments, and the decoding contract."""

from collections.abc import Sequence
from typing import Any

from experiments.report.blocks import Alert, Block, Cell, Paragraph, Section, Table, Verdict, table
from experiments.report.machine import FILE as MACHINE
from experiments.report.machine import machine_table
from experiments.report.pictures import design_figure
from experiments.report.runs import Run, pairs
from experiments.report.tables import head
from experiments.report.values import rate, scalar, words
from experiments.run.directory import INFORMATION, ROWS
from experiments.run.ledger import sha256_file
from minimodel.roles import ROLE_NAMES


def glance(runs: Sequence[Run]) -> Section:
    """Whether everything passed, and each run in one line."""
    faults = [fault for run in runs for fault in run.faults()]
    gates = sum(count["of"] for run in runs if run.summary for count in run.summary.get("gates", {}).values())
    passed = f"{len(runs)} runs, {sum(len(run.rows) for run in runs)} rows, {gates} gate checks: all passed."
    verdict: list[Block] = [Alert(fault) for fault in faults] if faults else [Verdict(passed)]
    lines: list[list[Cell]] = [
        [head(run), run.experiment, ", ".join(run.dtypes), str(len(run.rows)), _gates(run), "; ".join(headlines(run))]
        for run in runs
    ]
    header = ["run", "experiment", "dtype", "rows", "gates", "what it found"]
    return Section("At a glance", "glance", (*verdict, *_mixed(runs), table("Runs", header, lines)))


def _gates(run: Run) -> str:
    return "unfinished" if run.summary is None else "all passed" if run.summary["passed"] else "FAILED"


def headlines(run: Run) -> list[str]:
    """A run's main endpoints, each with its interval."""
    found = []
    for pair in pairs(run):
        found.append(f"{pair.dtype} suffixes differ {rate(pair.summary['suffix_disagreement'])}")
    summary = run.summary or {}
    recovery = summary.get("endpoints", {}).get("bidirectional_donor_recovery")
    if recovery:
        found.append(f"suffix follows the cache both ways {rate(recovery)}")
    if "token_disagreement" in summary:
        found.append(f"tokens of one copy and of two differ {rate(summary['token_disagreement'])}")
    for dtype, verdicts in summary.get("verdicts", {}).items():
        one = verdicts["cache"]
        count = f"{one['default_differs']} by default, {one['invariant_differs']} with both kernels invariant"
        found.append(f"{dtype} rows whose cache differs: {count}")
    if "all" in summary.get("identity", {}):
        found.append(f"equal in every bit {rate(summary['identity']['all'])}")
    if "joined" in summary:
        found.append(f"{summary['rows'] - len(summary['failed_rows'])}/{summary['rows']} joined rows agree")
    for site in ("keys", "values"):
        followed = [one["donor"] for one in summary.get("sites", {}).get(site, {}).values()]
        if followed:
            found.append(f"{site} alone move the suffix {' and '.join(rate(one) for one in followed)}")
    if summary.get("interpretation"):
        found.append(str(summary["interpretation"]))
    return found


def _mixed(runs: Sequence[Run]) -> list[Block]:
    """A note for each way in which the runs were made differently: environment, code, numeric contract."""
    warnings: list[Block] = []
    for key, what in (("environment", "environments"), ("code_sha256", "versions of the code")):
        kinds = {str(run.manifest.get(key)) for run in runs}
        if len(kinds) > 1:
            text = f"These runs come from {len(kinds)} different {what}; their bits may differ for that reason."
            warnings.append(Alert(text, "Note"))
    contracts: dict[str, set[str]] = {}
    for run in runs:
        first = {
            one["dtype"]: one for one in reversed(run.manifest["numeric"])
        }  # the cells of one causes run count as one contract
        for dtype, one in first.items():
            contracts.setdefault(dtype, set()).add(str(one))
    several = [dtype for dtype, kinds in contracts.items() if len(kinds) > 1]
    if several:
        text = f"These runs hold several numeric contracts for {', '.join(several)}: see the environment below."
        warnings.append(Alert(text, "Note"))
    return warnings


def environment(runs: Sequence[Run]) -> Section:
    """The numeric contracts and environments, and where each run comes from."""
    contracts = [(run, one) for run in runs for one in run.manifest["numeric"]]
    environments = [(run, run.manifest["environment"]) for run in runs]
    tables = [*kinds_tables("Numeric contract", contracts), *kinds_tables("Environment", environments)]
    beside = dict.fromkeys(run.path.resolve().parent / MACHINE for run in runs)
    tables += [machine_table(path) for path in beside if path.is_file()]
    return Section("Environment and provenance", "environment", (*tables, *(provenance(run) for run in runs)))


def kinds_tables(caption: str, found: Sequence[tuple[Run, dict[str, Any]]]) -> list[Table]:
    """Two tables: the fields that differ, one row per different object with its runs; the fields that are equal."""
    kinds: list[tuple[dict[str, Any], list[str]]] = []
    for run, value in found:
        names = next((names for kind, names in kinds if kind == value), None)
        if names is None:
            kinds.append((value, [run.name]))
        elif run.name not in names:
            names.append(run.name)
    keys = list(dict.fromkeys(key for kind, _ in kinds for key in kind))
    varying = [key for key in keys if len({str(kind.get(key)) for kind, _ in kinds}) > 1]
    same = [[words(key), scalar(kinds[0][0].get(key))] for key in keys if key not in varying]
    shared = table(f"{caption}, the same in all runs", ["field", "value"], same)
    if not varying:
        return [shared]
    lines = [[", ".join(names), *(scalar(kind.get(key)) for key in varying)] for kind, names in kinds]
    return [table(f"{caption}, where runs differ", ["runs", *(words(key) for key in varying)], lines), shared]


def provenance(run: Run) -> Section:
    """Directory, digests, code and time of one run."""
    manifest, information = run.manifest, run.manifest.get(INFORMATION, {})
    ledger = run.path / ROWS
    lines = [
        ("directory", str(run.path)),
        ("experiment", run.experiment),
        ("rows", f"{len(run.rows)} of {len(manifest['row_order'])}"),
        ("ledger SHA-256", sha256_file(ledger) if ledger.exists() else "none"),
        ("decoding time, all sessions", f"{run.seconds:.0f} s"),
        ("command line", " ".join(map(str, information.get("command", [])))),
        ("code SHA-256", scalar(manifest.get("code_sha256"))),
        ("git commit", scalar(information.get("git_commit")) + (" (modified)" if information.get("git_dirty") else "")),
        ("checkpoint", scalar(information.get("checkpoint"))),
        *((f"checkpoint {name}", str(digest)) for name, digest in manifest.get("checkpoint", {}).items()),
        *(("checkpoint warning", str(warning)) for warning in manifest.get("checkpoint_warnings", [])),
        ("tasks SHA-256", scalar(manifest.get("tasks_sha256"))),
        *((f"cap, {name}", str(cap)) for name, cap in manifest.get("caps", {}).items()),
    ]
    return Section(run.name, run.anchor, (table(f"Where {run.name} comes from", ["field", "value"], lines),))


def contract_section(runs: Sequence[Run]) -> Section | None:
    """The matched design and the visibility table; None where no run records a contract."""
    run = next((run for run in runs if run.manifest.get("visibility")), None)
    if run is None:
        return None
    visibility = run.manifest["visibility"]
    names = [words(ROLE_NAMES[role]) for role in range(len(visibility))]
    lines = [[name, *("yes" if seen else "" for seen in row)] for name, row in zip(names, visibility)]
    intro = Paragraph(
        "Six blocks in order: prompt, three branches, merge, answer. The attention mask is causal, and on top of that "
        "lets a query of one role see only the keys of the roles marked in its line."
    )
    shown = table("Visibility, query role by key role", ["query", *names], lines)
    return Section("Matched design and decoding contract", "contract", (design_figure(), intro, shown))
