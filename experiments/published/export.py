"""Writes our finished runs in the form of the paper's release: CSV files, paper_claims.json and analysis_plan.json.

The claims are computed from the exported columns by the code that recomputes the release's: every number of an export
follows from ledger rows, which are sealed, and none from a summary. Columns and file names: `published.columns`.
"""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.published.columns import FILES, pick
from experiments.run.directory import Run, read_finished
from experiments.run.ledger import require_distinct, row_key, write_whole
from minimodel.errors import InputError, refuse
from stats.published.claims import SCHEMA, recomputed

CLAIMS, PLAN = "paper_claims.json", "analysis_plan.json"
PLAN_SCHEMA = "stage-replay-public-analysis-plan-v1"
# the runs of a whole export, which its claims are about; a name with "-" is an experiment in one dtype
WHOLE = (
    *("matrix-bf16", "matrix-fp32", "fixed_prefix", "bridge"),
    *("audit", "transplant", "replication", "stock_control"),
)
Line = dict[str, Any]


def export_runs(paths: Sequence[Path], directory: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Writes `directory`/data/*.csv and, from a whole set of runs, paper_claims.json and analysis_plan.json.

    Returns each CSV file with its number of rows, and the runs that a whole set still lacks. Runs of one experiment in
    several precisions share a file. InputError for a run that is unfinished, failed a gate, or has no ledger in the
    release, and for runs of different plans or tasks.
    """
    files: dict[str, list[Line]] = {}
    runs = [_read_passed(path) for path in paths]
    for run in runs:
        name, names = FILES[run.experiment]
        found = [pick({**row, "dtype": run.numeric_of(key)["dtype"]}, names) for key, row in run.rows.items()]
        files.setdefault(name, []).extend(found)
        keys = [row_key({"row": line["row_id"], "dtype": line.get("precision")}) for line in files[name]]
        require_distinct(keys, f"{run.path}: exported rows")
    several = {f"matrix-{run.manifest['numeric'][0]['dtype']}": run for run in runs if run.experiment == "matrix"}
    given = {run.experiment: run for run in runs} | several
    missing = [name for name in WHOLE if name not in given]
    documents = {} if missing else {PLAN: plan(given)}
    (directory / "data").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        write_whole(directory / "data" / name, _csv(lines))
    if not missing:
        documents[CLAIMS] = {"schema": SCHEMA, **recomputed(directory / "data")}
    for name, value in documents.items():
        write_whole(directory / name, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
    return [(directory / "data" / name, len(lines)) for name, lines in files.items()], missing


def _read_passed(path: Path) -> Run:
    run, summary = read_finished(path)
    if run.experiment not in FILES:
        raise refuse(f"{path}: experiment", f"one of {' '.join(FILES)}", run.experiment)
    if not summary["passed"]:
        raise InputError(f"{path}: expected a run whose gates all passed, found {len(summary['failed_rows'])} failed")
    return run


def _csv(lines: Sequence[Line]) -> str:
    """Returns CSV in the release's spelling: true and false, an empty cell for none, floats in full, CRLF."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: _text(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def plan(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Returns analysis_plan.json from the manifests, which were written before the first row. InputError where the
    runs were made under different plans or over different tasks."""
    decoded = {name: run.manifest for name, run in runs.items() if name != "audit"}
    for key in ("plan", "tasks_sha256"):
        found = {str(manifest.get(key)) for manifest in decoded.values() if manifest.get(key) is not None}
        if len(found) != 1:
            raise InputError(f"export: expected runs of one {key}, found {len(found)} of them")
    matrix, transplant = runs["matrix-bf16"].manifest, decoded["transplant"]
    order = "".join(f"{row}\n" for row in matrix["row_order"])
    strata = [row["stratum"] for row in transplant["panel"]["rows"]]
    return {
        "fixed_prefix_matrix": {
            "arms": ["token-by-token incremental", "incremental replica", "one-shot prefill", "prefill replica"],
            "precisions": [one["dtype"] for one in decoded["fixed_prefix"]["numeric"]],
            "same_discrete_prefixes": True,
        },
        "matched_matrix": {
            "arms": ["retained live", "live replica", "one-shot prefill", "prefill replica"],
            "precisions": [decoded[f"matrix-{dtype}"]["numeric"][0]["dtype"] for dtype in ("bf16", "fp32")],
            "primary_comparison": "one-shot prefill minus retained live",
        },
        "population": {
            "dataset_file_sha256": matrix["tasks_sha256"],
            "item_order_sha256": hashlib.sha256(order.encode("utf-8")).hexdigest(),
            "rows": len(matrix["row_order"]),
            "selection": "all rows in frozen source order; no exclusions",
        },
        "prospective_bridge": {
            "rows": len(decoded["bridge"]["row_order"]),
            "selection": decoded["bridge"]["panel"]["rule"],
        },
        "schema": PLAN_SCHEMA,
        "status": "the plan of the runs' manifests, each written before its first row",
        "uncertainty": matrix["plan"]["uncertainty"],
        "whole_cache_transplant": {
            "intervention": "bidirectional replacement of all key/value layer pairs",
            "later_rows": len(decoded["replication"]["row_order"]),
            "later_selection": decoded["replication"]["panel"]["rule"],
            "primary_endpoint": "exact donor-trajectory recovery",
            "primary_rows": len(strata),
            "primary_selection": f"{strata.count('divergent')} prior-divergent and {strata.count('exact')} prior-exact "
            "length-spread rows",
        },
    }
