"""The claims on each released ledger: the two 200-row matrices (matched live/prefill, fixed-prefix incremental/prefill)
and across precisions, bridge, historical audit, transplants and the stock-checkpoint batch control.

A count is of flags; where a flag follows from other columns, such as digests, the two are checked to agree.
"""

import statistics

from stats.donors import DONORS, DonorRow, donor_endpoints
from stats.endpoints import compare_labels, difference_of_differences, disagreement, divergence_spread
from stats.errors import StatsInputError
from stats.intervals import STREAMS, Bootstrap, Proportion
from stats.published.tables import NUMBER, OPTIONAL, WHOLE, Table

_STATE = ("functional_state_equal", "all_storage_disjoint")
_PARTS = ("cache", "logits")
_AUDIT_PAIRS = ("live_replica", "live_prefill", "prefill_replica")
_AUDIT_FLAGS = (
    "prefix_commitment_equal",
    *(f"{pair}_suffix_equal" for pair in ("live_incremental", "live_replica", "prefill", "prefill_replica")),
    "comparison_objects_equal",
    *(f"{part}_{pair}_fingerprint_equal" for part in _PARTS for pair in _AUDIT_PAIRS),
)
_AUDIT_LEAVES = ("cache_common_scalar_leaves_per_section", "logit_common_scalar_leaves_per_section")
_BRIDGE_GATES = (*(f"{arm}_clone_{part}_exact" for arm in ("live", "teacher") for part in _PARTS), *_STATE)
_TRANSPLANT_GATES = (
    *("incremental_replica_exact", "prefill_replica_exact", "boundary_argmax_equal"),
    *("all_48_layer_pairs_transplanted", *_STATE),
)
_DRIFT = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")


def matrix_claims(split: dict[str, Table], left: str, name: str) -> dict[str, object]:
    """Returns the claims on a matrix, by precision. `left`: its first arm, "live" or "incremental"; the other arm is
    prefill. `name`: that of its bootstrap streams, "matched" or "fixed".
    """
    prefixes = (
        zip(table.text("prefix_sha256"), table.read("prefix_token_count", WHOLE), strict=True)
        for table in split.values()
    )
    return {
        **{dtype: _precision_claims(table, left, STREAMS[f"{name}_{dtype}"]) for dtype, table in split.items()},
        "cross_precision_prefix_exact_rows": sum(low == high for low, high in zip(*prefixes, strict=True)),
    }


def _precision_claims(table: Table, left: str, stream: int) -> dict[str, object]:
    """Returns the claims on a matrix in one precision, the arm `left` against prefill."""
    labels = [table.flags(f"{arm}_correct") for arm in (left, "prefill")]
    accuracy = compare_labels(labels[0], labels[1], stream)
    divergence = table.read("first_suffix_divergence_index", OPTIONAL)
    equal = {
        "suffix": _suffix_equal(table, left),
        **{part: table.flags(f"{part}_equal") for part in ("trace", "merge", "answer")},
        "correctness_label": table.same(f"{left}_correct", "prefill_correct"),
    }
    return {
        "rows": len(table),
        **_counts(_gates(table, left)),
        "immediate_argmax_different_rows": table.flags("boundary_argmax_equal").count(False),
        **{f"{name}_disagreement": _rate(disagreement(flags)) for name, flags in equal.items()},
        "first_divergence": divergence_spread(divergence),
        "first_token_divergence_rows": divergence.count(0),
        f"{left}_correct": accuracy.left,
        "prefill_correct": accuracy.right,
        f"{left}_only_correct": accuracy.left_only,
        "prefill_only_correct": accuracy.right_only,
        "accuracy_delta_prefill_minus_left_pp": accuracy.bootstrap.difference,
        "accuracy_paired_bootstrap_95_ci_pp": accuracy.bootstrap.interval,
        "mcnemar_exact_two_sided_p": accuracy.mcnemar_p,
        **{f"{column}_median": statistics.median(table.read(column, NUMBER)) for column in _DRIFT},
        **(_relative_l2(table) if left == "incremental" else {}),
    }


def _rate(value: Proportion) -> dict[str, object]:
    """Returns a rate in the release's spelling: {count, n, rate, wilson_95_ci}."""
    return {"count": value.count, "n": value.n, "rate": value.rate, "wilson_95_ci": [value.low, value.high]}


def _counts(flags: dict[str, list[bool]]) -> dict[str, int]:
    """Returns {name_rows: number of true flags}."""
    return {f"{name}_rows": sum(found) for name, found in flags.items()}


def _gates(table: Table, left: str) -> dict[str, list[bool]]:
    """Returns the integrity gates of a matrix, and whether cache and logits of the two arms are exact, by row."""
    gates = {name: table.flags(name) for name in _STATE}
    for arm in (left, "prefill"):
        replica = f"{arm}_replica"
        table.agree(f"{replica}_suffix_exact", table.same(f"{arm}_suffix_sha256", f"{replica}_suffix_sha256"))
        gates[f"{replica}_exact"] = table.flags(*(f"{replica}_{part}_exact" for part in (*_PARTS, "suffix")))
    return {
        **gates,
        "integrity_pass": table.agree("integrity_pass", [all(row) for row in zip(*gates.values(), strict=True)]),
        **{f"{part}_exact": table.flags(f"{left}_prefill_{part}_exact") for part in _PARTS},
    }


def _suffix_equal(table: Table, left: str) -> list[bool]:
    """Returns whether the suffixes are equal, by row; digests and divergence index must say the same."""
    divergence = table.read("first_suffix_divergence_index", OPTIONAL)
    table.agree("suffix_equal", [index is None for index in divergence])
    return table.agree("suffix_equal", table.same(f"{left}_suffix_sha256", "prefill_suffix_sha256"))


def _relative_l2(table: Table) -> dict[str, object]:
    """Returns the median of the cache's L2 difference divided by the larger source norm."""
    column = "cache_relative_l2_diff"
    left, right, delta = (table.read(f"cache_{name}_l2_norm", NUMBER) for name in ("left", "right", "delta"))
    stated = table.read(column, NUMBER)
    for i, norm in enumerate(map(max, left, right)):
        if norm <= 0 or delta[i] / norm != stated[i]:
            raise table.malformed(i, column, f"{delta[i] / norm if norm > 0 else 'a positive norm'} (from its norms)")
    return {f"{column}_median": statistics.median(stated)}


def cross_precision_claims(split: dict[str, Table]) -> dict[str, object]:
    """Returns the paired FP32 - BF16 reductions of each disagreement and of the accuracy effect, on fixed prefixes."""
    arms = ("incremental_correct", "prefill_correct")
    correct = [(table.flags(arms[0]), table.flags(arms[1])) for table in split.values()]
    effect = difference_of_differences(correct[0], correct[1], STREAMS["accuracy_difference_of_differences"])
    claims: dict[str, object] = {"accuracy_effect_difference": _reduction(effect)}
    equal = [
        {
            "suffix": _suffix_equal(table, "incremental"),
            "answer": table.flags("answer_equal"),
            "correctness": table.same(*arms),
            "logits": table.flags("incremental_prefill_logits_exact"),
        }
        for table in split.values()
    ]
    for part in equal[0]:
        low, high = ([not flag for flag in side[part]] for side in equal)
        found = compare_labels(low, high, STREAMS[f"cross_{part}"])
        claims["correctness_flip" if part == "correctness" else f"{part}_mismatch"] = {
            "bf16_count": found.left,
            "fp32_count": found.right,
            "bf16_only": found.left_only,
            "fp32_only": found.right_only,
            **_reduction(found.bootstrap),
            "mcnemar_exact_two_sided_p": found.mcnemar_p,
        }
    return claims


def _reduction(effect: Bootstrap) -> dict[str, object]:
    """Returns a difference between precisions in the release's spelling."""
    return {"delta_fp32_minus_bf16_pp": effect.difference, "paired_bootstrap_95_ci_pp": effect.interval}


def bridge_claims(table: Table) -> dict[str, object]:
    """Returns the claims on the bridge: a new live boundary against incremental construction of the same prefix."""
    cache = table.flags("live_teacher_cache_exact")
    flags = {
        "integrity_pass": table.agree("integrity_pass", table.flags("integrity_pass", *_BRIDGE_GATES)),
        "live_teacher_cache_exact": cache,
        "live_teacher_logits_exact": table.flags("live_teacher_logits_exact"),
        "all_48_layers_exact": table.agree("all_48_layers_exact", cache),
    }
    for column, left, right in (
        ("live_teacher_suffix_exact", "live_suffix_sha256", "teacher_suffix_sha256"),
        ("live_matches_historical_prefix", "new_prefix_sha256", "historical_prefix_sha256"),
    ):
        flags[column] = table.agree(column, table.same(left, right))
    lengths = {age: table.read(f"{age}_prefix_token_count", WHOLE) for age in ("new", "historical")}
    return {
        "rows": len(table),
        **_counts(flags),
        **{f"{age}_prefix_length_range": [min(found), max(found)] for age, found in lengths.items()},
    }


def audit_claims(table: Table) -> dict[str, object]:
    """Returns the claims on the 200-row join of the matched and the fixed-prefix ledgers."""
    leaves: dict[str, object] = {}
    for column in _AUDIT_LEAVES:
        leaves[column], *others = sorted(set(table.read(column, WHOLE)))
        if others:
            found = [leaves[column], *others[:4]]
            raise StatsInputError(f"{table.name}, column {column}: expected one value in all rows, found {found}")
    flags = {"audit_pass": table.agree("audit_pass", table.flags(*_AUDIT_FLAGS))}
    flags |= {column: table.flags(column) for column in _AUDIT_FLAGS}
    return {"rows": len(table), **_counts(flags), **leaves}


def transplant_claims(table: Table) -> dict[str, object]:
    """Returns the claims on a whole-cache transplant panel, from suffix digests."""
    suffixes = (table.text(f"{arm}_suffix_sha256") for arm in ("incremental_native", "prefill_native", *DONORS))
    rows = [DonorRow(*row) for row in zip(*suffixes, strict=True)]
    table.agree("baseline_divergent", [row.divergent for row in rows])
    for arm in DONORS:
        table.agree(f"{arm}_recovers_donor", [row.sides[arm] == "donor" for row in rows])
    table.agree("exact_control_novel_trajectory", [not row.divergent and row.novel for row in rows])
    endpoints = donor_endpoints(rows)
    return {
        "rows": len(table),
        "integrity_pass_rows": sum(table.agree("integrity_pass", table.flags(*_TRANSPLANT_GATES))),
        "baseline_exact_rows": endpoints["exact_control_novel_trajectory"].n,
        **{name: _rate(found) for name, found in endpoints.items()},
    }


def stock_claims(table: Table) -> dict[str, object]:
    """Returns the claims on the batch control: one copy against two copies of one input, on the public backbone."""
    flags = {}
    for part in ("token", "logprob"):
        exact = [index is None for index in table.read(f"first_{part}_divergence_index", OPTIONAL)]
        flags[f"singleton_pair_{part}_exact"] = table.agree(f"singleton_pair_{part}s_exact", exact)
        flags[f"pair_replica_{part}_exact"] = table.flags(f"pair_replica_{part}s_exact")
    return {"rows": len(table), **_counts(flags)}
