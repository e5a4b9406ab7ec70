"""Writes our finished runs in the form of the paper's release: CSV files, paper_claims.json and analysis_plan.json.

The claims are taken from the runs' summaries, not from the exported columns, so that recomputing them from the columns
checks each number along two ways. Columns and file names: `published.columns`.
"""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.published.columns import AUDIT_FLAGS, AUDIT_LEAVES, FILES, Line, audit_leaves
from experiments.run.directory import Run, read_finished
from experiments.run.ledger import write_whole
from minimodel.errors import InputError, refuse
from stats.donors import INTO_INCREMENTAL, INTO_PREFILL
from stats.published.claims import SCHEMA

CLAIMS, PLAN = "paper_claims.json", "analysis_plan.json"
PLAN_SCHEMA = "stage-replay-public-analysis-plan-v1"
# run of a whole export: where its claims come from; a name with "-" is an experiment in one dtype
WHOLE = (
    *("matrix-bf16", "matrix-fp32", "fixed_prefix", "bridge"),
    *("audit", "transplant", "replication", "stock_control"),
)
Summary = Mapping[str, Any]


def export_runs(paths: Sequence[Path], directory: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Writes `directory`/data/*.csv and, from a whole set of runs, paper_claims.json and analysis_plan.json.

    Returns each CSV file with its number of rows, and the runs that a whole set still lacks. Runs of one experiment in
    several precisions share a file. InputError for a run that is unfinished, failed a gate, or has no ledger in the
    release.
    """
    files: dict[str, list[Line]] = {}
    runs = [_read_passed(path) for path in paths]
    for run in runs:
        name, line = FILES[run.experiment]
        found = [line(row, run.numeric_of(key)["dtype"]) for key, row in run.rows.items()]
        files.setdefault(name, []).extend(found)
        _require_once(run.path, files[name])
    given = named(runs)
    missing = [name for name in WHOLE if name not in given]
    documents = {} if missing else {CLAIMS: claims(given), PLAN: plan(given)}
    (directory / "data").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        write_whole(directory / "data" / name, _csv(lines))
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


def _require_once(path: Path, lines: Sequence[Line]) -> None:
    seen: set[tuple[object, object]] = set()
    for line in lines:
        key = (line.get("precision"), line["row_id"])
        if key in seen:
            raise refuse(f"{path}: exported rows", "each row of a precision once", key[1])
        seen.add(key)


def _csv(lines: Sequence[Line]) -> str:
    """CSV in the release's spelling: true and false, an empty cell for none, floats in full, CRLF."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: _text(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def named(runs: list[Run]) -> dict[str, Run]:
    """Returns the runs by the names in WHOLE."""
    found = {}
    for run in runs:
        dtype = str(run.numeric()[0]["dtype"])
        found[f"matrix-{dtype}" if run.experiment == "matrix" else run.experiment] = run
    return found


def claims(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Returns paper_claims.json of a whole set of runs, by the names in WHOLE."""
    summary = {name: run.summary or {} for name, run in runs.items()}
    fixed = summary["fixed_prefix"]
    return {
        "fixed_prefix_2x2": {
            **{
                dtype: {
                    **_matrix(block, "incremental"),
                    "cache_relative_l2_diff_median": block["cache"]["relative_l2_median"],
                }
                for dtype, block in fixed["precisions"].items()
            },
            "cross_precision": _crossing(fixed["cross_precision"]),
            "cross_precision_prefix_exact_rows": fixed["cross_precision"]["prefix_identity"]["count"],
        },
        "historical_bridge": _audit(runs["audit"]),
        "matched_live_prefill": {
            **{dtype: _matrix(summary[f"matrix-{dtype}"], "live") for dtype in ("bf16", "fp32")},
            "cross_precision_prefix_exact_rows": _matched(runs["matrix-bf16"], runs["matrix-fp32"]),
        },
        "prospective_bridge": _bridge(summary["bridge"]),
        "schema": SCHEMA,
        "stock_qwen_diagnostic": _stock(summary["stock_control"]),
        "transplant_later": _transplant(summary["replication"]),
        "transplant_primary": _transplant(summary["transplant"]),
    }


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


def _rate(block: Mapping[str, Any]) -> dict[str, Any]:
    interval = block["wilson_95"] or [None, None]
    return {"count": block["count"], "n": block["n"], "rate": block["rate"], "wilson_95_ci": interval}


def _passed(summary: Summary) -> int:
    return int(summary["rows"]) - len(summary["failed_rows"])


def _matrix(summary: Summary, left: str) -> dict[str, Any]:
    """One matrix at one precision."""
    gates = {name: count["passed"] for name, count in summary["gates"].items()}
    accuracy, cache, logits = summary["accuracy"], summary["cache"], summary["logits"]
    return {
        "accuracy_delta_prefill_minus_left_pp": accuracy["difference_points"],
        "accuracy_paired_bootstrap_95_ci_pp": accuracy["bootstrap_95"],
        "all_storage_disjoint_rows": gates["storage_disjoint"],
        "answer_disagreement": _rate(summary["answer_tokens_disagreement"]),
        "cache_exact_rows": cache["exact_rows"],
        "cache_max_abs_diff_median": cache["max_abs_median"],
        "cache_mean_abs_diff_median": cache["mean_abs_median"],
        "correctness_label_disagreement": _rate(summary["correctness_disagreement"]),
        "first_divergence": summary["first_divergence"],
        "first_token_divergence_rows": summary["first_token_divergence_rows"],
        "functional_state_equal_rows": gates["functional_state"],
        "immediate_argmax_different_rows": summary["rows"] - summary["argmax_equal_rows"],
        "integrity_pass_rows": _passed(summary),
        f"{left}_correct": accuracy[left]["correct"],
        f"{left}_only_correct": accuracy["left_only"],
        f"{left}_replica_exact_rows": gates[f"replica_{left}"],
        "logit_max_abs_diff_median": logits["max_abs_median"],
        "logit_mean_abs_diff_median": logits["mean_abs_median"],
        "logits_exact_rows": logits["exact_rows"],
        "mcnemar_exact_two_sided_p": accuracy["mcnemar_p"],
        "merge_disagreement": _rate(summary["merge_disagreement"]),
        "prefill_correct": accuracy["prefill"]["correct"],
        "prefill_only_correct": accuracy["right_only"],
        "prefill_replica_exact_rows": gates["replica_prefill"],
        "rows": summary["rows"],
        "suffix_disagreement": _rate(summary["suffix_disagreement"]),
        "trace_disagreement": _rate(summary["suffix_disagreement"]),
    }


def _crossing(crossed: Summary) -> dict[str, Any]:
    names = {
        "answer_mismatch": "answer_tokens_disagreement",
        "correctness_flip": "correctness_disagreement",
        "logits_mismatch": "logits_disagreement",
        "suffix_mismatch": "suffix_disagreement",
    }
    effect = crossed["accuracy_difference_of_differences"]
    return {
        "accuracy_effect_difference": {
            "delta_fp32_minus_bf16_pp": effect["difference_points"],
            "paired_bootstrap_95_ci_pp": effect["bootstrap_95"],
        },
        **{
            name: {
                **{key: crossed[ours][key] for key in ("bf16_count", "bf16_only", "fp32_count", "fp32_only")},
                "delta_fp32_minus_bf16_pp": crossed[ours]["difference_points"],
                "mcnemar_exact_two_sided_p": crossed[ours]["mcnemar_p"],
                "paired_bootstrap_95_ci_pp": crossed[ours]["bootstrap_95"],
            }
            for name, ours in names.items()
        },
    }


def _matched(bf16: Run, fp32: Run) -> int:
    return sum(bf16.rows[key]["prefix"] == fp32.rows[key]["prefix"] for key in bf16.rows)


def _bridge(summary: Summary) -> dict[str, Any]:
    identity = {part: block["count"] for part, block in summary["identity"].items()}
    saved, new = summary["saved_prefix_length"], summary["prefix_length"]
    return {
        "all_48_layers_exact_rows": identity["cache"],
        "historical_prefix_length_range": [saved["min"], saved["max"]],
        "integrity_pass_rows": _passed(summary),
        "live_matches_historical_prefix_rows": summary["saved_prefix_agreement"]["count"],
        **{f"live_teacher_{part}_exact_rows": identity[part] for part in ("cache", "logits", "suffix")},
        "new_prefix_length_range": [new["min"], new["max"]],
        "rows": summary["rows"],
    }


def _audit(run: Run) -> dict[str, Any]:
    summary, rows = run.summary or {}, list(run.rows.values())
    counts = {
        f"{column}_rows": sum(all(row["gates"][gate] for gate in gates) for row in rows)
        for column, gates in AUDIT_FLAGS.items()
    }
    leaves = {column: audit_leaves(rows[0], part) for column, part in AUDIT_LEAVES.items()}
    return {"audit_pass_rows": _passed(summary), **leaves, **counts, "rows": summary["rows"]}


def _transplant(summary: Summary) -> dict[str, Any]:
    endpoints = summary["endpoints"]
    names = (f"{INTO_PREFILL}_donor_recovery", f"{INTO_INCREMENTAL}_donor_recovery", "bidirectional_donor_recovery")
    return {
        "baseline_exact_rows": endpoints["baseline_exact_rows"],
        "integrity_pass_rows": _passed(summary),
        "rows": summary["rows"],
        **{name: _rate(endpoints[name]) for name in ("baseline_divergence", *names, "exact_control_novel_trajectory")},
    }


def _stock(summary: Summary) -> dict[str, Any]:
    rows, replica = summary["rows"], summary["gates"]["replica_pair"]["passed"]
    return {
        "pair_replica_logprob_exact_rows": replica,
        "pair_replica_token_exact_rows": replica,
        "rows": rows,
        "singleton_pair_logprob_exact_rows": rows - summary["logprob_disagreement"]["count"],
        "singleton_pair_token_exact_rows": rows - summary["token_disagreement"]["count"],
    }
