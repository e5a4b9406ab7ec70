"""The claims on each released ledger: the two 200-row matrices (matched live/prefill, fixed-prefix incremental/prefill)
and across precisions, bridge, historical audit, transplants and the stock-checkpoint batch control.
"""

import statistics
from collections.abc import Callable, Sequence

from stats.donors import DONORS, DonorRow, donor_endpoints
from stats.endpoints import compare_labels, difference_of_differences, disagreement, divergence_spread
from stats.errors import StatsInputError
from stats.intervals import STREAMS, Bootstrap, Proportion
from stats.published.tables import Row, count

AUDIT_PAIRS = ("live_replica", "live_prefill", "prefill_replica")
AUDIT_FLAGS = (
    "prefix_commitment_equal",
    *(f"{pair}_suffix_equal" for pair in ("live_incremental", "live_replica", "prefill", "prefill_replica")),
    "comparison_objects_equal",
    *(f"{part}_{pair}_fingerprint_equal" for part in ("cache", "logits") for pair in AUDIT_PAIRS),
)
AUDIT_LEAVES = ("cache_common_scalar_leaves_per_section", "logit_common_scalar_leaves_per_section")
_BRIDGE_GATES = (
    *(f"{arm}_clone_{part}_exact" for arm in ("live", "teacher") for part in ("cache", "logits")),
    *("functional_state_equal", "all_storage_disjoint"),
)
_TRANSPLANT_GATES = (
    *("incremental_replica_exact", "prefill_replica_exact", "functional_state_equal", "boundary_argmax_equal"),
    *("all_storage_disjoint", "all_48_layer_pairs_transplanted"),
)
_DRIFT = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")


def proportion(value: Proportion) -> dict[str, object]:
    """Return a rate in the release's spelling: {count, n, rate, wilson_95_ci}."""
    return {"count": value.count, "n": value.n, "rate": value.rate, "wilson_95_ci": [value.low, value.high]}


def matrix_claims(rows: Sequence[Row], left: str, stream: str) -> dict[str, object]:
    """Return the claims on one matrix at one precision. `left`: "live" or "incremental"; the other arm is prefill."""
    suffix_equal = [_suffix_equal(row, left) for row in rows]
    labels = [[row.flag(f"{arm}_correct") for row in rows] for arm in (left, "prefill")]
    accuracy = compare_labels(labels[0], labels[1], STREAMS[stream])
    divergence = [row.optional_whole("first_suffix_divergence_index") for row in rows]
    rates: dict[str, list[bool]] = {
        "suffix_disagreement": suffix_equal,
        **{
            f"{part}_disagreement": [row.flag(f"{part}_equal") for row in rows] for part in ("trace", "merge", "answer")
        },
        "correctness_label_disagreement": [a == b for a, b in zip(*labels, strict=True)],
    }
    return {
        "rows": len(rows),
        **_gates(rows, left),
        **{name: proportion(disagreement(equal)) for name, equal in rates.items()},
        "first_divergence": divergence_spread(divergence),
        "first_token_divergence_rows": divergence.count(0),
        f"{left}_correct": accuracy.left,
        "prefill_correct": accuracy.right,
        f"{left}_only_correct": accuracy.left_only,
        "prefill_only_correct": accuracy.right_only,
        "accuracy_delta_prefill_minus_left_pp": accuracy.bootstrap.difference,
        "accuracy_paired_bootstrap_95_ci_pp": accuracy.bootstrap.interval,
        "mcnemar_exact_two_sided_p": accuracy.mcnemar_p,
        **{f"{column}_median": statistics.median([row.number(column) for row in rows]) for column in _DRIFT},
    }


def _gates(rows: Sequence[Row], left: str) -> dict[str, int]:
    """Count the rows that pass each integrity gate. Raises StatsInputError where a verdict contradicts its gates."""
    gates = {f"{arm}_replica_exact": [_replica_exact(row, arm) for row in rows] for arm in (left, "prefill")}
    gates |= {name: [row.flag(name) for row in rows] for name in ("functional_state_equal", "all_storage_disjoint")}
    passed = [row.agree("integrity_pass", all(one)) for row, *one in zip(rows, *gates.values(), strict=True)]
    return {
        **{f"{name}_rows": sum(flags) for name, flags in gates.items()},
        "integrity_pass_rows": sum(passed),
        "cache_exact_rows": count(rows, f"{left}_prefill_cache_exact"),
        "logits_exact_rows": count(rows, f"{left}_prefill_logits_exact"),
        "immediate_argmax_different_rows": len(rows) - count(rows, "boundary_argmax_equal"),
    }


def _replica_exact(row: Row, arm: str) -> bool:
    suffix = row.agree(f"{arm}_replica_suffix_exact", row.same(f"{arm}_suffix_sha256", f"{arm}_replica_suffix_sha256"))
    return suffix and row.flags(f"{arm}_replica_cache_exact", f"{arm}_replica_logits_exact")


def _suffix_equal(row: Row, left: str) -> bool:
    """Compare the digests. Raises StatsInputError where the row's flag or first-divergence index contradicts them."""
    equal = row.agree("suffix_equal", row.same(f"{left}_suffix_sha256", "prefill_suffix_sha256"))
    if (row.optional_whole("first_suffix_divergence_index") is None) != equal:
        raise StatsInputError(f"{row.where}: suffix_equal and first_suffix_divergence_index contradict each other")
    return equal


def relative_l2_median(rows: Sequence[Row]) -> float:
    """Return the median over rows of the cache's L2 difference divided by the larger source norm."""
    values = []
    for row in rows:
        norm = max(row.number("cache_left_l2_norm"), row.number("cache_right_l2_norm"))
        if norm <= 0:
            raise StatsInputError(f"{row.where}: expected a positive cache norm, found {norm}")
        values.append(row.number("cache_delta_l2_norm") / norm)
        if values[-1] != row.number("cache_relative_l2_diff"):
            raise row.malformed("cache_relative_l2_diff", f"{values[-1]} (from its norms)")
    return statistics.median(values)


def prefix_equal_rows(split: dict[str, list[Row]]) -> int:
    """Count the rows whose boundary prefix has one digest and one length in both precisions."""
    pairs = zip(split["bf16"], split["fp32"], strict=True)
    return sum(
        a.text("prefix_sha256") == b.text("prefix_sha256")
        and a.whole("prefix_token_count") == b.whole("prefix_token_count")
        for a, b in pairs
    )


def cross_precision_claims(split: dict[str, list[Row]], left: str) -> dict[str, object]:
    """Return the paired FP32 - BF16 reductions of each disagreement and of the accuracy effect."""
    correct = (f"{left}_correct", "prefill_correct")
    mismatch: dict[str, tuple[str, Callable[[Row], bool]]] = {
        "suffix_mismatch": ("cross_suffix", lambda row: not _suffix_equal(row, left)),
        "answer_mismatch": ("cross_answer", lambda row: not row.flag("answer_equal")),
        "correctness_flip": ("cross_correctness", lambda row: row.flag(correct[0]) != row.flag(correct[1])),
        "logits_mismatch": ("cross_logits", lambda row: not row.flag(f"{left}_prefill_logits_exact")),
    }
    labels = [[[row.flag(column) for row in rows] for column in correct] for rows in split.values()]
    effect = difference_of_differences(
        (labels[0][0], labels[0][1]), (labels[1][0], labels[1][1]), STREAMS["accuracy_difference_of_differences"]
    )
    claims: dict[str, object] = {"accuracy_effect_difference": _reduction(effect)}
    for name, (stream, differs) in mismatch.items():
        low, high = ([differs(row) for row in rows] for rows in split.values())
        found = compare_labels(low, high, STREAMS[stream])
        claims[name] = {
            "bf16_count": found.left,
            "fp32_count": found.right,
            "bf16_only": found.left_only,
            "fp32_only": found.right_only,
            **_reduction(found.bootstrap),
            "mcnemar_exact_two_sided_p": found.mcnemar_p,
        }
    return claims


def _reduction(effect: Bootstrap) -> dict[str, object]:
    return {"delta_fp32_minus_bf16_pp": effect.difference, "paired_bootstrap_95_ci_pp": effect.interval}


def bridge_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the bridge: a new live boundary against incremental construction of the same prefix."""
    lengths = {age: [row.whole(f"{age}_prefix_token_count") for row in rows] for age in ("new", "historical")}
    for row in rows:
        if row.flag("integrity_pass") and not row.flags(*_BRIDGE_GATES):
            raise row.malformed("integrity_pass", "false (from the row's other columns)")
    derived: dict[str, Callable[[Row], bool] | None] = {
        **dict.fromkeys(("integrity_pass", "live_teacher_cache_exact", "live_teacher_logits_exact")),
        "all_48_layers_exact": lambda row: row.flag("live_teacher_cache_exact"),
        "live_teacher_suffix_exact": lambda row: row.same("live_suffix_sha256", "teacher_suffix_sha256"),
        "live_matches_historical_prefix": lambda row: row.same("new_prefix_sha256", "historical_prefix_sha256"),
    }
    return {
        "rows": len(rows),
        **{f"{column}_rows": count(rows, column, derive) for column, derive in derived.items()},
        **{f"{age}_prefix_length_range": [min(found), max(found)] for age, found in lengths.items()},
    }


def audit_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the 200-row join of the matched and the fixed-prefix ledgers."""
    leaves: dict[str, object] = {}
    for column in AUDIT_LEAVES:
        leaves[column], *others = sorted({row.whole(column) for row in rows})
        if others:
            where, found = rows[0].where.split()[0], [leaves[column], *others[:4]]
            raise StatsInputError(f"{where}, column {column}: expected one value in all rows, found {found}")
    return {
        "rows": len(rows),
        "audit_pass_rows": count(rows, "audit_pass", lambda row: row.flags(*AUDIT_FLAGS)),
        **{f"{column}_rows": count(rows, column) for column in AUDIT_FLAGS},
        **leaves,
    }


def transplant_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on a whole-cache transplant panel, from suffix digests, checked with the row's verdicts."""
    endpoints = donor_endpoints([_donor_row(row) for row in rows])
    return {
        "rows": len(rows),
        "integrity_pass_rows": count(rows, "integrity_pass", lambda row: row.flags(*_TRANSPLANT_GATES)),
        "baseline_exact_rows": endpoints["exact_control_novel_trajectory"].n,
        **{name: proportion(found) for name, found in endpoints.items()},
    }


def _donor_row(row: Row) -> DonorRow:
    found = DonorRow(*(row.text(f"{arm}_suffix_sha256") for arm in ("incremental_native", "prefill_native", *DONORS)))
    row.agree("baseline_divergent", found.divergent)
    for arm, side in found.sides.items():
        row.agree(f"{arm}_recovers_donor", side == "donor")
    row.agree("exact_control_novel_trajectory", not found.divergent and found.novel)
    return found


def stock_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the batch control: one copy against two copies of one input, on the public backbone."""
    claims: dict[str, object] = {"rows": len(rows)}
    for part in ("token", "logprob"):
        exact = [row.optional_whole(f"first_{part}_divergence_index") is None for row in rows]
        agree = [row.agree(f"singleton_pair_{part}s_exact", flag) for row, flag in zip(rows, exact, strict=True)]
        claims[f"singleton_pair_{part}_exact_rows"] = sum(agree)
        claims[f"pair_replica_{part}_exact_rows"] = count(rows, f"pair_replica_{part}s_exact")
    return claims
