"""summary.json from ledger rows: one pair of arms, every endpoint with its interval."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.ledger import row_key
from experiments.harness.records import Endpoints, GateCount, PairEndpoints, Row, Summary
from stats.endpoints import compare_labels, disagreement, divergence_spread
from stats.intervals import Z_MATRIX


def gate_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, GateCount]:
    """Counts each gate over all rows. A row that failed closed fails every gate."""
    names = list(dict.fromkeys(name for row in rows for name in row["gates"]))
    return {name: {"passed": sum(bool(row["gates"].get(name)) for row in rows), "of": len(rows)} for name in names}


def pair_summary(rows: Sequence[Row], left: str, right: str, stream: int = 0, z: float = Z_MATRIX) -> PairEndpoints:
    """Returns the endpoints of one comparison. stream: the bootstrap's, of the accuracies. z: the Wilson intervals'."""
    name = f"{left}:{right}"
    kept = [row for row in rows if name in row["comparisons"]]
    pairs = [row["comparisons"][name] for row in kept]
    if not pairs:
        return {"comparison": name, "compared_rows": 0}
    divergences = [pair["suffix"]["first_divergence"] for pair in pairs]
    scored: PairEndpoints = {}
    if "correct_equal" in pairs[0]:
        labels = [[row["arms"][arm]["correct"] for row in kept] for arm in (left, right)]
        scored = {
            "answer_disagreement": disagreement([pair["answer_equal"] for pair in pairs], z).as_dict(),
            "correctness_disagreement": disagreement([pair["correct_equal"] for pair in pairs], z).as_dict(),
            "accuracy": compare_labels(labels[0], labels[1], stream).accuracy_dict(left, right),
        }
    return {
        "comparison": name,
        "compared_rows": len(pairs),
        "suffix_disagreement": disagreement([pair["suffix"]["exact"] for pair in pairs], z).as_dict(),
        "merge_disagreement": disagreement([pair["merge_equal"] for pair in pairs], z).as_dict(),
        "answer_tokens_disagreement": disagreement([pair["answer_tokens_equal"] for pair in pairs], z).as_dict(),
        **scored,
        "first_divergence": divergence_spread(divergences).as_dict(),
        "first_token_divergence_rows": divergences.count(0),
        "cache": _drift([pair["cache"] for pair in pairs]),
        "logits": _drift([pair["logits"] for pair in pairs]),
        "argmax_equal_rows": sum(pair["argmax_equal"] for pair in pairs),
    }


def no_result(rows: Sequence[Row]) -> str | None:
    """Returns why endpoints over these rows are no result; None where every row passed every gate."""
    if not rows:
        return "no row was decoded"
    failed = [row for row in rows if not row["passed"]]
    if not failed:
        return None
    gates = {name: count["of"] - count["passed"] for name, count in gate_counts(rows).items()}
    counts = ", ".join(f"{name} on {count}" for name, count in gates.items() if count)
    kept = sum("failure" not in row for row in rows)
    return f"gates failed on {len(failed)} of {len(rows)} rows ({counts}); endpoints are over {kept} rows"


def _drift(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str) -> float | None:
        values = [entry[key] for entry in entries if entry[key] is not None]
        return statistics.median(values) if values else None

    return {
        "exact_rows": sum(entry["exact"] for entry in entries),
        "relative_l2_median": median("relative_l2"),
        "max_abs_median": median("max_abs"),
        "mean_abs_median": median("mean_abs"),
    }


def run_summary(experiment: str, dtype: str, rows: Sequence[Row], endpoints: Endpoints) -> Summary:
    """Returns the summary's head, common to all experiments, and the experiment's own endpoints."""
    prefixes = [row["prefix"]["length"] for row in rows if "prefix" in row]
    return {
        "experiment": experiment,
        "dtype": dtype,
        "rows": len(rows),
        "passed": bool(rows) and all(row["passed"] for row in rows),
        "failed_rows": [row_key(row) for row in rows if not row["passed"]],
        "gates": gate_counts(rows),
        "no_result": no_result(rows),
        "prefix_length": {"median": statistics.median(prefixes), "min": min(prefixes), "max": max(prefixes)}
        if prefixes
        else None,
        **endpoints,
    }
