"""summary.json from ledger rows: one pair of arms, every endpoint with its interval; two precisions joined by row
(paper, sections 3.3 and 3.4).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.run.ledger import row_key
from experiments.run.records import Comparison, Endpoints, PairEndpoints, Row, Summary
from stats.endpoints import compare_labels, difference_of_differences, disagreement, divergence_spread
from stats.intervals import STREAMS, Z_MATRIX, wilson


def gate_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
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
        "first_divergence": divergence_spread(divergences),
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
    lengths = [row["prefix"]["length"] for row in rows if "prefix" in row]
    spread = {"median": statistics.median(lengths), "min": min(lengths), "max": max(lengths)} if lengths else None
    return {
        "experiment": experiment,
        "dtype": dtype,
        "rows": len(rows),
        "passed": bool(rows) and all(row["passed"] for row in rows),
        "failed_rows": [row_key(row) for row in rows if not row["passed"]],
        "gates": gate_counts(rows),
        "no_result": no_result(rows),
        "prefix_length": spread,
        **endpoints,
    }


DIFFERS: dict[str, tuple[str, Callable[[Comparison], bool]]] = {
    "suffix_disagreement": ("cross_suffix", lambda pair: not pair["suffix"]["exact"]),
    "answer_disagreement": ("cross_answer", lambda pair: not pair["answer_equal"]),
    "answer_tokens_disagreement": ("cross_answer", lambda pair: not pair["answer_tokens_equal"]),
    "correctness_disagreement": ("cross_correctness", lambda pair: not pair["correct_equal"]),
    "logits_disagreement": ("cross_logits", lambda pair: not pair["logits"]["exact"]),
}


def cross_precision(rows: Sequence[Row], left: str, right: str, arms: tuple[str, str]) -> dict[str, Any]:
    """Returns the block `cross_precision`: right minus left in points, paired by row, for the disagreement of `arms`.

    left, right: dtypes; the paper's are bf16 and fp32. Rows that failed closed in either precision are left out, and
    `rows` says how many remain. `prefix_identity` counts rows with one integer prefix in both precisions;
    `functional_state_identity` those whose arms were all given the same tokens, roles, positions and mask rows.
    """
    name = ":".join(arms)
    sides = [{row["row"]: row for row in rows if row["dtype"] == dtype and row["arms"]} for dtype in (left, right)]
    joined = [(sides[0][row], sides[1][row]) for row in sides[0] if row in sides[1]]
    block: dict[str, Any] = {"left": left, "right": right, "comparison": name, "rows": len(joined)}
    if not joined:
        return block
    same = [a["prefix"] == b["prefix"] for a, b in joined]
    states = [{row["arms"][arm]["boundary_state_sha256"] for row in pair for arm in arms} for pair in joined]
    pairs = [[row["comparisons"][name] for row in side] for side in zip(*joined)]
    labels = [[[row["arms"][arm]["correct"] for row in side] for arm in arms] for side in zip(*joined)]
    block["prefix_identity"] = wilson(sum(same), len(same), Z_MATRIX).as_dict()
    block["functional_state_identity"] = wilson(sum(len(one) == 1 for one in states), len(states), Z_MATRIX).as_dict()
    for key, (stream, differs) in DIFFERS.items():
        found = compare_labels([differs(a) for a in pairs[0]], [differs(b) for b in pairs[1]], STREAMS[stream])
        block[key] = found.reduction_dict(left, right)
    effect = difference_of_differences(
        (labels[0][0], labels[0][1]), (labels[1][0], labels[1][1]), STREAMS["accuracy_difference_of_differences"]
    )
    block["accuracy_difference_of_differences"] = {"n": effect.n, **effect.as_dict()}
    return block


def matched_prefixes(
    left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]], dtypes: tuple[str, str]
) -> dict[str, Any]:
    """Joins two matrices by row and counts the rows whose boundary prefixes are identical (paper, section 3.3).

    left, right: the rows of a matrix in each of `dtypes`; rows that failed closed are left out, `rows` says how many
    remain. `reading`: what a difference between the endpoints of the two may be called.
    """
    sides = [{row_key(row): row["prefix"] for row in rows if "prefix" in row} for rows in (left, right)]
    joined = [key for key in sides[0] if key in sides[1]]
    same = sum(sides[0][key] == sides[1][key] for key in joined)
    fixed, other = "a fixed-prefix precision effect", "a precision-surface comparison"
    effect = fixed if joined and same == len(joined) else f"{other} and not {fixed}"
    identity = f"{dtypes[0]} and {dtypes[1]} reached one integer prefix on {same} of {len(joined)} rows"
    return {
        "left": dtypes[0],
        "right": dtypes[1],
        "rows": len(joined),
        "prefix_identity": wilson(same, len(joined), Z_MATRIX).as_dict(),
        "reading": f"{identity}: the difference of their endpoints is {effect}.",
    }
