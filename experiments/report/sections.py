"""The page's sections: the runs at a glance, the matched design, kernels side by side, each experiment, and where the
numbers come from."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.report.blocks import Alert, Block, Cell, Figure, Paragraph, Report, Section, Table, Verdict
from experiments.report.figures import pair_blocks
from experiments.report.rows import row_entries
from experiments.report.runs import Run, pairs
from experiments.report.summaries import endpoint_blocks, gate_table, head
from experiments.report.values import rate, scalar, words
from experiments.run.directory import INFORMATION, ROWS
from experiments.run.ledger import leaves, sha256_file
from experiments.run.records import PairEndpoints
from minimodel.errors import refuse
from minimodel.files import read_json_object
from minimodel.numerics import KERNELS
from minimodel.roles import ROLE_NAMES

# experiment: its title and question; the order is that of the study
EXPERIMENTS = {
    "matrix": "Retained live cache against prefill. Each boundary is generated once. The retained live cache and a "
    "one-call prefill of the same tokens are then continued by one greedy suffix decoder; a replica of each is the "
    "floor of the comparison and its gate.",
    "fixed_prefix": "Fixed prefixes across precision. The same integer prefixes, built token by token and in one "
    "call, in each precision: what precision changes when nothing else does.",
    "bridge": "Bridge: live against incremental. Ordinary decoding reaches a new boundary; its exact prefix is then "
    "consumed token by token. Equal bits mean that the incremental construction stands for the live one.",
    "audit": "Audit of two ledgers. Two saved ledgers joined by row: every leaf that both record must agree.",
    "transplant": "Whole-cache transplants. Every K/V tensor of one construction is replaced by the other's, both "
    "ways, on rows frozen beforehand: does the suffix follow the cache?",
    "replication": "Replication on another checkpoint. The transplants again, on a later checkpoint and on rows "
    "chosen by prefix length alone; the label is the one that was frozen with the design.",
    "batch_control": "Batch control. One copy of an input against two identical copies in one batch.",
    "stock_control": "Stock control. One copy of a chat prompt against two identical copies in one batch, on a "
    "checkpoint without role table.",
    "causes": "Causes. Kernels, precisions and constructions crossed on the same fixed prefixes.",
    "carrier": "Carriers. Partial transplants: which part of the cache carries the trajectory.",
}
# construction, what feeds the tokens, what its replica is
DESIGN = (
    ("live", "kept from ordinary generation", "a bit-exact copy"),
    ("incremental", "the fixed tokens, one per call", "a bit-exact copy"),
    ("prefill", "the fixed tokens in one call", "a second, independent call"),
)
DRAWING = Path(__file__).with_name("design.svg")  # prefix, constructions, transplants, suffix decoder (paper, Figure 1)
TITLE = "Stage replay: what the cache's construction changes"
DEFAULT, INVARIANT = "/".join(KERNELS["repeat_kv"]), "/".join(KERNELS["invariant"])
DECODED = ("boundary", "incremental", "prefill")  # of the time of a causes row; the rest is oracle and chunks
MACHINE_SCHEMA, MACHINE_FILE = "stage-replay-machine-v1", "machine.json"
MACHINE_HEADER = ["dtype", "attention", "linear", "copies equal", "rows together", "packed = plain at"]
MACHINE_HEADER += ["prefill = incremental", "step, ms"]


def build_report(runs: Sequence[Run]) -> Report:
    """Returns all sections of the report of `runs`, in the study's order; unknown experiments stand last."""
    names = list(dict.fromkeys([*EXPERIMENTS, *(run.experiment for run in runs)]))
    runs = sorted(runs, key=lambda run: names.index(run.experiment))
    grouped = itertools.groupby(runs, key=lambda run: run.experiment)
    about = [experiment_section(experiment, list(members)) for experiment, members in grouped]
    sections = [glance(runs), contract_section(runs), side_by_side(runs), *about, environment(runs)]
    return Report(TITLE, [section for section in sections if section is not None], row_entries(runs))


def glance(runs: Sequence[Run]) -> Section:
    """Returns whether everything passed, and each run in one line."""
    faults: list[Block] = [Alert(fault) for run in runs for fault in run.faults()]
    gates = sum(count["of"] for run in runs for count in run.summary.get("gates", {}).values())
    passed = f"{len(runs)} runs, {sum(len(run.rows) for run in runs)} rows, {gates} gate checks: all passed."
    lines: list[list[Cell]] = []
    for run in runs:
        verdict = "unfinished" if not run.summary else "all passed" if run.summary["passed"] else "FAILED"
        found = "; ".join(headlines(run))
        lines.append([head(run), run.experiment, ", ".join(run.dtypes), str(len(run.rows)), verdict, found])
    shown = Table("Runs", ["run", "experiment", "dtype", "rows", "gates", "what it found"], lines)
    return Section("At a glance", "glance", (*(faults or [Verdict(passed)]), *_mixed(runs), shown))


def headlines(run: Run) -> Iterator[str]:
    """Yields a run's main endpoints, each with its interval."""
    for pair in pairs(run):
        yield f"{pair.dtype} suffixes differ {rate(pair.summary['suffix_disagreement'])}"
    summary = run.summary
    if recovery := _recovery(run):
        yield f"suffix follows the cache both ways {rate(recovery)}"
    if "token_disagreement" in summary:
        yield f"tokens of one copy and of two differ {rate(summary['token_disagreement'])}"
    for dtype, verdicts in summary.get("verdicts", {}).items():
        one = verdicts["cache"]
        count = f"{one['default_differs']} by default, {one['invariant_differs']} with both kernels invariant"
        yield f"{dtype} rows whose cache differs: {count}"
    if "all" in summary.get("identity", {}):
        yield f"equal in every bit {rate(summary['identity']['all'])}"
    if "joined" in summary:
        yield f"{summary['rows'] - len(summary['failed_rows'])}/{summary['rows']} joined rows agree"
    for site in ("keys", "values"):
        if followed := [rate(one["donor"]) for one in summary.get("sites", {}).get(site, {}).values()]:
            yield f"{site} alone move the suffix {' and '.join(followed)}"
    if summary.get("interpretation"):
        yield str(summary["interpretation"])


def _recovery(run: Run) -> dict[str, Any] | None:
    return (run.summary.get("endpoints") or {}).get("bidirectional_donor_recovery")


def _mixed(runs: Sequence[Run]) -> Iterator[Block]:
    """Yields a note for each way in which the runs were made differently: environment, code, numeric contract."""
    for key, what in (("environment", "environments"), ("code_sha256", "versions of the code")):
        count = len({str(run.manifest.get(key)) for run in runs})
        if count > 1:
            text = f"These runs come from {count} different {what}; their bits may differ for that reason."
            yield Alert(text, "Note")
    contracts: dict[str, set[str]] = {}
    for run in runs:  # the cells of one causes run count as one contract
        for dtype, one in {one["dtype"]: one for one in reversed(run.manifest["numeric"])}.items():
            contracts.setdefault(dtype, set()).add(str(one))
    if several := ", ".join(dtype for dtype, kinds in contracts.items() if len(kinds) > 1):
        yield Alert(f"These runs hold several numeric contracts for {several}: see the environment below.", "Note")


def contract_section(runs: Sequence[Run]) -> Section | None:
    """Returns the matched design and the visibility table; None if no run records a contract."""
    visibility = next((run.manifest["visibility"] for run in runs if run.manifest.get("visibility")), None)
    if visibility is None:
        return None
    names = [words(ROLE_NAMES[role]) for role in range(len(visibility))]
    lines = [[name, *("yes" if seen else "" for seen in row)] for name, row in zip(names, visibility)]
    intro = Paragraph(
        "Six blocks in order: prompt, three branches, merge, answer. The attention mask is causal, and in addition "
        "a query of one role sees only the keys of the roles marked in its line."
    )
    shown = Table("Visibility, query role by key role", ["query", *names], lines)
    figure = Figure(
        "design",
        "The matched design. A matrix compares live with prefill, fixed prefixes compare incremental with prefill at "
        "each precision, the bridge compares live with incremental, and transplants exchange whole caches.",
        Table("The three constructions", ["construction", "fed with", "replica"], DESIGN),
        lambda: DRAWING.read_text(encoding="utf-8").rstrip("\n"),
        wide=True,
    )
    return Section("Matched design and decoding contract", "contract", (figure, intro, shown))


class Kernels(NamedTuple):
    """Two constructions compared under one pair of kernels in one run."""

    run: Run
    dtype: str
    name: str  # ATTENTION/LINEAR
    summary: PairEndpoints
    seconds: dict[str, float]  # by row id
    chunks: dict[str, Any]  # the chunk curve of a causes cell; empty elsewhere


def side_by_side(runs: Sequence[Run]) -> Section | None:
    """Returns default kernels, whole-cache transplants and batch-invariant kernels with their cost in one table; None
    unless some run has the default kernels and some run the invariant ones."""
    found = [one for run in runs for one in _compared(run)]
    if not {DEFAULT, INVARIANT} <= {one.name for one in found}:
        return None
    lines: list[list[Cell]] = [_kernels_line(one, found) for one in found if one.name != INVARIANT]
    for run, recovery in ((run, _recovery(run)) for run in runs):
        if recovery:
            [one] = run.manifest["numeric"]
            what = f"whole cache transplanted, {one['attention']}/{one['linear']}"
            suffix = f"follows its donor both ways {rate(recovery)}"
            lines.append([what, head(run), one["dtype"], "the donor's", suffix, "not measured", "not measured"])
    lines += [_kernels_line(one, found) for one in found if one.name == INVARIANT]
    header = ["what", "run", "dtype", "cache bit-exact", "suffix", "chunk sizes exact", "cost per row"]
    intro = Paragraph(
        "By default the constructions differ in bits; a suffix follows the cache that it is given; where every kernel "
        "is batch-invariant, nothing differs. The cost is the median, over rows that both decoded, of this line's "
        "seconds over the default's in the same experiment and precision; seconds of a shared machine are rough."
    )
    return Section("Default, transplant, invariant", "side-by-side", (intro, Table("Side by side", header, lines)))


def _compared(run: Run) -> Iterator[Kernels]:
    """Yields a run's comparisons, and of a causes run the default and the invariant cells. Skips transplant runs: their
    rows were chosen by outcome, or decoded by another checkpoint."""
    for pair in pairs(run) if not _recovery(run) else ():
        name = next(f"{n['attention']}/{n['linear']}" for n in run.manifest["numeric"] if n["dtype"] == pair.dtype)
        yield Kernels(run, pair.dtype, name, pair.summary, {t["row"]: t["seconds"] for t in run.timing}, {})
    for cell, summary in run.summary.get("cells", {}).items():
        dtype, name = cell.split("/", 1)
        if name in (DEFAULT, INVARIANT) and summary["compared_rows"]:
            times = [
                (t["row"].removeprefix(f"{cell}/"), t["arms"]) for t in run.timing if t["row"].startswith(f"{cell}/")
            ]
            seconds = {row: sum(arms.get(part, 0.0) for part in DECODED) for row, arms in times}
            yield Kernels(run, dtype, name, summary, seconds, run.summary["chunks"].get(cell, {}))


def _kernels_line(one: Kernels, found: Sequence[Kernels]) -> list[Cell]:
    """Returns one comparison's line. Its cost is over the first default run of its kind that has common rows."""
    kind = (one.run.experiment, one.dtype, DEFAULT)
    bases = [base.seconds for base in found if (base.run.experiment, base.dtype, base.name) == kind]
    ratios = [[one.seconds[row] / base[row] for row in one.seconds if row in base] for base in bases]
    shared = next(filter(None, ratios), [])
    cost = f"{statistics.median(shared):.2f} ({len(shared)} rows)" if shared else "not measured"
    exact = sum(curve["exact_rows"] == curve["rows"] for curve in one.chunks.values())
    return [
        {DEFAULT: "default, ", INVARIANT: "invariant, "}.get(one.name, "") + one.name,
        head(one.run),
        one.dtype,
        f"{one.summary['cache']['exact_rows']}/{one.summary['compared_rows']}",
        f"differs {rate(one.summary['suffix_disagreement'])}",
        f"{exact} of {len(one.chunks)}" if one.chunks else "not measured",
        "1" if one.name == DEFAULT else cost,
    ]


def experiment_section(experiment: str, runs: Sequence[Run]) -> Section:
    """Returns the section on one experiment: its tables, and the drawings of its pairs and rows."""
    title, _, question = EXPERIMENTS.get(experiment, words(experiment)).partition(". ")
    slug = "".join(c if c.isalnum() and c.isascii() else "-" for c in experiment).strip("-").lower() or "other"
    finished = [run for run in runs if run.summary]
    blocks: list[Block] = [Paragraph(question)] if question else []
    blocks += [Alert(fault) for run in runs for fault in run.faults()]
    blocks += endpoint_blocks(experiment, finished, pair_blocks(slug, finished))
    blocks += [gate_table(finished)] if any(run.summary.get("gates") for run in finished) else []
    for run in finished:
        caption = f"Every value of {run.name}/summary.json"
        found = leaves(run.summary).items()
        values = [(path, repr(one) if isinstance(one, float) else str(one)) for path, one in found]
        blocks.append(Table(caption, ["value", head(run)], values, folded=True))
    return Section(title, f"experiment-{slug}", blocks)


def environment(runs: Sequence[Run]) -> Section:
    """Returns the numeric contracts and environments, and where each run comes from."""
    contracts = [(run, one) for run in runs for one in run.manifest["numeric"]]
    environments = [(run, run.manifest["environment"]) for run in runs]
    tables: list[Block] = [*_kinds("Numeric contract", contracts), *_kinds("Environment", environments)]
    beside = dict.fromkeys(run.path.resolve().parent / MACHINE_FILE for run in runs)
    tables += [block for path in beside if path.is_file() for block in machine_file(path)]
    return Section("Environment and provenance", "environment", (*tables, *(provenance(run) for run in runs)))


def _kinds(caption: str, found: Sequence[tuple[Run, dict[str, Any]]]) -> list[Table]:
    """Returns the fields that differ, one row per different object with its runs, and the fields that are equal."""
    keys = list(dict.fromkeys(key for _, one in found for key in one))
    varying = [key for key in keys if len({str(one.get(key)) for _, one in found}) > 1]
    kinds: dict[str, tuple[dict[str, Any], dict[str, None]]] = {}  # different objects, each with the names of its runs
    for run, one in found:
        kinds.setdefault(repr([one.get(key) for key in varying]), (one, {}))[1][run.name] = None
    same = [[words(key), scalar(found[0][1].get(key))] for key in keys if key not in varying]
    lines = [[", ".join(names), *(scalar(one.get(key)) for key in varying)] for one, names in kinds.values()]
    differing = Table(f"{caption}, where runs differ", ["runs", *map(words, varying)], lines)
    shared = Table(f"{caption}, the same in all runs", ["field", "value"], same)
    return [differing, shared] if varying else [shared]


def provenance(run: Run) -> Section:
    """Returns directory, digests, code and time of one run."""
    manifest, information, ledger = run.manifest, run.manifest.get(INFORMATION, {}), run.path / ROWS
    dirty = " (modified)" if information.get("git_dirty") else ""
    lines = [
        ("directory", str(run.path)),
        ("experiment", run.experiment),
        ("rows", f"{len(run.rows)} of {len(manifest['row_order'])}"),
        ("ledger SHA-256", sha256_file(ledger) if ledger.exists() else "none"),
        ("decoding time, all sessions", f"{sum(line.get('seconds', 0.0) for line in run.timing):.0f} s"),
        ("command line", " ".join(map(str, information.get("command", [])))),
        ("code SHA-256", scalar(manifest.get("code_sha256"))),
        ("git commit", scalar(information.get("git_commit")) + dirty),
        ("checkpoint", scalar(information.get("checkpoint"))),
        *((f"checkpoint {name}", str(digest)) for name, digest in manifest.get("checkpoint", {}).items()),
        *(("checkpoint warning", str(warning)) for warning in manifest.get("checkpoint_warnings", [])),
        ("tasks SHA-256", scalar(manifest.get("tasks_sha256"))),
        *((f"cap, {name}", str(cap)) for name, cap in manifest.get("caps", {}).items()),
    ]
    return Section(run.name, run.anchor, (Table(f"Where {run.name} comes from", ["field", "value"], lines),))


def machine_blocks(document: dict[str, Any]) -> list[Block]:
    """Returns machine.json as a table; then why a row is not available or its copies are not equal."""
    record, rows, notes = document["environment"], [], []
    for one in document["rows"]:
        cells, reason = ["not available", "", "", "", ""], one.get("refused")
        if reason is None:
            counts, tried = one["packed_equals_plain_at"], one.get("packed_tried_at", [])
            packed = ", ".join(map(str, counts or [])) or "none"
            cells = [
                "yes" if one["copies_equal"] else "NO",
                f"{one['rows_together']} of {one['rows_tried']}",
                "" if counts is None else f"all {len(tried)} tried, to {tried[-1]}" if counts == tried else packed,
                "yes" if one["invariant"] else "no",
                f"{one['step_seconds'] * 1e3:.2f}",
            ]
            reason = None if one["copies_equal"] else one["reasons"][0]
        rows.append([one["dtype"], one["attention"], one["linear"], *cells])
        if reason is not None:
            notes.append(Paragraph(f"{one['dtype']} {one['attention']}/{one['linear']}: {reason}"))
    caption = (
        f"What holds on the machine: {record['cpu']}, {record['cpu_capability']}, {document['cores']} cores, "
        f"load {document['load']}; torch {record['torch']}, device {document['device']}, "
        f"{document['threads']} threads; memory read {document['read_gigabytes_per_second']:.1f} GB/s"
    )
    return [Table(caption, MACHINE_HEADER, rows), *notes]


def machine_file(path: Path) -> list[Block]:
    """Returns the blocks of a machine.json. InputError if it is another file."""
    document = read_json_object(path)
    if document.get("schema") != MACHINE_SCHEMA:
        raise refuse(f"{path}: schema", repr(MACHINE_SCHEMA), document.get("schema"))
    return machine_blocks(document)
