"""The claims on the two 200-row matrices (matched live/prefill, fixed-prefix incremental/prefill) and across
precisions.
"""

import statistics
from collections.abc import Callable, Sequence

from stats.endpoints import (
    PairedComparison,
    compare_labels,
    difference_of_differences,
    disagreement,
    divergence_spread,
)
from stats.errors import StatsInputError
from stats.intervals import STREAMS, Proportion
from stats.published.tables import Row

PRECISIONS = ("bf16", "fp32")
_DRIFT = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")


def proportion(value: Proportion) -> dict[str, object]:
    """Return a rate in the release's spelling: {count, n, rate, wilson_95_ci}."""
    return {"count": value.count, "n": value.n, "rate": value.rate, "wilson_95_ci": [value.low, value.high]}


def by_precision(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each precision, in file order. Raises StatsInputError unless both have the same row ids."""
    split = {name: [row for row in rows if row.text("precision") == name] for name in PRECISIONS}
    other = next((row for row in rows if row.text("precision") not in PRECISIONS), None)
    if other is not None:
        raise StatsInputError(f"{other.where}: expected precision bf16 or fp32, found {other.text('precision')!r}")
    ids = [[row.text("row_id") for row in split[name]] for name in PRECISIONS]
    if ids[0] != ids[1]:
        where = rows[0].where.split()[0]
        raise StatsInputError(
            f"{where}: expected the same row ids in both precisions, found {len(ids[0])} and {len(ids[1])}"
        )
    return split


def matrix_claims(rows: Sequence[Row], left: str, stream: str) -> dict[str, object]:
    """Return the claims on one matrix at one precision. `left`: "live" or "incremental"; the other arm is prefill."""
    suffix_equal = [_suffix_equal(row, left) for row in rows]
    accuracy = compare_labels(
        [row.flag(f"{left}_correct") for row in rows], [row.flag("prefill_correct") for row in rows], STREAMS[stream]
    )
    label_equal = [row.flag(f"{left}_correct") == row.flag("prefill_correct") for row in rows]
    divergence = [row.optional_whole("first_suffix_divergence_index") for row in rows]
    return {
        "rows": len(rows),
        **_gates(rows, left),
        "suffix_disagreement": proportion(disagreement(suffix_equal)),
        "trace_disagreement": proportion(disagreement([row.flag("trace_equal") for row in rows])),
        "merge_disagreement": proportion(disagreement([row.flag("merge_equal") for row in rows])),
        "answer_disagreement": proportion(disagreement([row.flag("answer_equal") for row in rows])),
        "correctness_label_disagreement": proportion(disagreement(label_equal)),
        "first_divergence": divergence_spread(divergence).as_dict(),
        "first_token_divergence_rows": divergence.count(0),
        **_accuracy(accuracy, left),
        **{f"{column}_median": statistics.median([row.number(column) for row in rows]) for column in _DRIFT},
    }


def relative_l2_median(rows: Sequence[Row]) -> float:
    """Return the median over rows of the cache's L2 difference divided by the larger source norm."""
    values = []
    for row in rows:
        norm = max(row.number("cache_left_l2_norm"), row.number("cache_right_l2_norm"))
        delta = row.number("cache_delta_l2_norm")
        if norm <= 0:
            raise StatsInputError(f"{row.where}: expected a positive cache norm, found {norm}")
        if delta / norm != row.number("cache_relative_l2_diff"):
            raise StatsInputError(
                f"{row.where}, column cache_relative_l2_diff: expected {delta / norm} (from its norms), "
                f"found {row.text('cache_relative_l2_diff')}"
            )
        values.append(delta / norm)
    return statistics.median(values)


def prefix_equal_rows(split: dict[str, list[Row]]) -> int:
    """Count the rows whose boundary prefix has one digest and one length in both precisions."""
    return sum(
        a.text("prefix_sha256") == b.text("prefix_sha256")
        and a.whole("prefix_token_count") == b.whole("prefix_token_count")
        for a, b in zip(split["bf16"], split["fp32"], strict=True)
    )


def cross_precision_claims(split: dict[str, list[Row]], left: str) -> dict[str, object]:
    """Return the paired FP32 - BF16 reductions of each disagreement and of the accuracy effect."""
    correct = {
        name: tuple([row.flag(f"{arm}_correct") for row in rows] for arm in (left, "prefill"))
        for name, rows in split.items()
    }
    mismatch: dict[str, tuple[str, Callable[[Row], bool]]] = {
        "suffix_mismatch": ("cross_suffix", lambda row: not _suffix_equal(row, left)),
        "answer_mismatch": ("cross_answer", lambda row: not row.flag("answer_equal")),
        "correctness_flip": (
            "cross_correctness",
            lambda row: row.flag(f"{left}_correct") != row.flag("prefill_correct"),
        ),
        "logits_mismatch": ("cross_logits", lambda row: not row.flag(f"{left}_prefill_logits_exact")),
    }
    effect = difference_of_differences(
        (correct["bf16"][0], correct["bf16"][1]),
        (correct["fp32"][0], correct["fp32"][1]),
        STREAMS["accuracy_difference_of_differences"],
    )
    claims: dict[str, object] = {
        "accuracy_effect_difference": {
            "delta_fp32_minus_bf16_pp": effect.difference,
            "paired_bootstrap_95_ci_pp": effect.interval,
        }
    }
    for name, (stream, differs) in mismatch.items():
        reduction = compare_labels(
            [differs(row) for row in split["bf16"]], [differs(row) for row in split["fp32"]], STREAMS[stream]
        )
        claims[name] = {
            "bf16_count": reduction.left,
            "fp32_count": reduction.right,
            "bf16_only": reduction.left_only,
            "fp32_only": reduction.right_only,
            "delta_fp32_minus_bf16_pp": reduction.difference_points,
            "paired_bootstrap_95_ci_pp": reduction.bootstrap.interval,
            "mcnemar_exact_two_sided_p": reduction.mcnemar_p,
        }
    return claims


def _suffix_equal(row: Row, left: str) -> bool:
    """Compare the digests. Raises StatsInputError where the row's flag or first-divergence index contradicts them."""
    equal = row.agree("suffix_equal", row.same(f"{left}_suffix_sha256", "prefill_suffix_sha256"))
    if (row.optional_whole("first_suffix_divergence_index") is None) != equal:
        raise StatsInputError(f"{row.where}: suffix_equal and first_suffix_divergence_index contradict each other")
    return equal


def _gates(rows: Sequence[Row], left: str) -> dict[str, int]:
    """Count the rows that pass each integrity gate. Raises StatsInputError where a verdict contradicts its gates."""
    replicas = {arm: [_replica_exact(row, arm) for row in rows] for arm in (left, "prefill")}
    state = [row.flag("functional_state_equal") for row in rows]
    storage = [row.flag("all_storage_disjoint") for row in rows]
    passed = [
        row.agree("integrity_pass", all(gates))
        for row, *gates in zip(rows, replicas[left], replicas["prefill"], state, storage, strict=True)
    ]
    return {
        f"{left}_replica_exact_rows": sum(replicas[left]),
        "prefill_replica_exact_rows": sum(replicas["prefill"]),
        "functional_state_equal_rows": sum(state),
        "all_storage_disjoint_rows": sum(storage),
        "integrity_pass_rows": sum(passed),
        "cache_exact_rows": sum(row.flag(f"{left}_prefill_cache_exact") for row in rows),
        "logits_exact_rows": sum(row.flag(f"{left}_prefill_logits_exact") for row in rows),
        "immediate_argmax_different_rows": sum(not row.flag("boundary_argmax_equal") for row in rows),
    }


def _replica_exact(row: Row, arm: str) -> bool:
    suffix = row.same(f"{arm}_suffix_sha256", f"{arm}_replica_suffix_sha256")
    row.agree(f"{arm}_replica_suffix_exact", suffix)
    return suffix and row.flags(f"{arm}_replica_cache_exact", f"{arm}_replica_logits_exact")


def _accuracy(accuracy: PairedComparison, left: str) -> dict[str, object]:
    return {
        f"{left}_correct": accuracy.left,
        "prefill_correct": accuracy.right,
        f"{left}_only_correct": accuracy.left_only,
        "prefill_only_correct": accuracy.right_only,
        "accuracy_delta_prefill_minus_left_pp": accuracy.difference_points,
        "accuracy_paired_bootstrap_95_ci_pp": accuracy.bootstrap.interval,
        "mcnemar_exact_two_sided_p": accuracy.mcnemar_p,
    }
