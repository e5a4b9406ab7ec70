"""The claims on the smaller ledgers: bridge, historical audit, transplants and the stock-checkpoint batch control."""

from collections.abc import Sequence

from stats.donors import DonorRow, donor_endpoints
from stats.errors import StatsInputError
from stats.published.matrices import proportion
from stats.published.tables import Row

_AUDIT_FLAGS = (
    "prefix_commitment_equal",
    "live_incremental_suffix_equal",
    "live_replica_suffix_equal",
    "prefill_suffix_equal",
    "prefill_replica_suffix_equal",
    "comparison_objects_equal",
    "cache_live_replica_fingerprint_equal",
    "cache_live_prefill_fingerprint_equal",
    "cache_prefill_replica_fingerprint_equal",
    "logits_live_replica_fingerprint_equal",
    "logits_live_prefill_fingerprint_equal",
    "logits_prefill_replica_fingerprint_equal",
)
_AUDIT_LEAVES = ("cache_common_scalar_leaves_per_section", "logit_common_scalar_leaves_per_section")
_BRIDGE_GATES = (
    "live_clone_cache_exact",
    "live_clone_logits_exact",
    "teacher_clone_cache_exact",
    "teacher_clone_logits_exact",
    "functional_state_equal",
    "all_storage_disjoint",
)
_TRANSPLANT_GATES = (
    "incremental_replica_exact",
    "prefill_replica_exact",
    "functional_state_equal",
    "boundary_argmax_equal",
    "all_storage_disjoint",
    "all_48_layer_pairs_transplanted",
)


def audit_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the 200-row join of the matched and the fixed-prefix ledgers."""
    return {
        "rows": len(rows),
        "audit_pass_rows": sum(row.agree("audit_pass", row.flags(*_AUDIT_FLAGS)) for row in rows),
        **{f"{column}_rows": sum(row.flag(column) for row in rows) for column in _AUDIT_FLAGS},
        **{column: _constant(rows, column) for column in _AUDIT_LEAVES},
    }


def bridge_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the bridge: a new live boundary against incremental construction of the same prefix."""
    new = [row.whole("new_prefix_token_count") for row in rows]
    historical = [row.whole("historical_prefix_token_count") for row in rows]
    return {
        "rows": len(rows),
        "integrity_pass_rows": sum(_bridge_passed(row) for row in rows),
        "live_teacher_cache_exact_rows": sum(row.flag("live_teacher_cache_exact") for row in rows),
        "all_48_layers_exact_rows": sum(
            row.agree("all_48_layers_exact", row.flag("live_teacher_cache_exact")) for row in rows
        ),
        "live_teacher_logits_exact_rows": sum(row.flag("live_teacher_logits_exact") for row in rows),
        "live_teacher_suffix_exact_rows": sum(
            row.agree("live_teacher_suffix_exact", row.same("live_suffix_sha256", "teacher_suffix_sha256"))
            for row in rows
        ),
        "live_matches_historical_prefix_rows": sum(
            row.agree("live_matches_historical_prefix", row.same("new_prefix_sha256", "historical_prefix_sha256"))
            for row in rows
        ),
        "new_prefix_length_range": [min(new), max(new)],
        "historical_prefix_length_range": [min(historical), max(historical)],
    }


def transplant_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on a whole-cache transplant panel, from suffix digests, checked with the row's verdicts."""
    endpoints = donor_endpoints([_donor_row(row) for row in rows])
    return {
        "rows": endpoints.rows,
        "integrity_pass_rows": sum(row.agree("integrity_pass", row.flags(*_TRANSPLANT_GATES)) for row in rows),
        "baseline_divergence": proportion(endpoints.baseline_divergence),
        "baseline_exact_rows": endpoints.exact_rows,
        "incremental_cache_into_prefill_donor_recovery": proportion(endpoints.incremental_cache_into_prefill),
        "prefill_cache_into_incremental_donor_recovery": proportion(endpoints.prefill_cache_into_incremental),
        "bidirectional_donor_recovery": proportion(endpoints.bidirectional),
        "exact_control_novel_trajectory": proportion(endpoints.exact_control_novel),
    }


def stock_claims(rows: Sequence[Row]) -> dict[str, object]:
    """Return the claims on the batch control: one copy against two copies of one input, on the public backbone."""
    return {
        "rows": len(rows),
        "pair_replica_token_exact_rows": sum(row.flag("pair_replica_tokens_exact") for row in rows),
        "pair_replica_logprob_exact_rows": sum(row.flag("pair_replica_logprobs_exact") for row in rows),
        "singleton_pair_token_exact_rows": sum(
            row.agree("singleton_pair_tokens_exact", row.optional_whole("first_token_divergence_index") is None)
            for row in rows
        ),
        "singleton_pair_logprob_exact_rows": sum(
            row.agree("singleton_pair_logprobs_exact", row.optional_whole("first_logprob_divergence_index") is None)
            for row in rows
        ),
    }


def _constant(rows: Sequence[Row], column: str) -> int:
    values = sorted({row.whole(column) for row in rows})
    if len(values) != 1:
        raise StatsInputError(
            f"{rows[0].where.split()[0]}, column {column}: expected one value in all rows, found {values[:5]}"
        )
    return values[0]


def _bridge_passed(row: Row) -> bool:
    """Return the row's verdict. Raises StatsInputError where it is true while one of its gates is false."""
    if row.flag("integrity_pass") and not row.flags(*_BRIDGE_GATES):
        raise StatsInputError(
            f"{row.where}, column integrity_pass: expected false (from the row's other columns), found true"
        )
    return row.flag("integrity_pass")


def _donor_row(row: Row) -> DonorRow:
    suffixes = DonorRow(
        incremental=row.text("incremental_native_suffix_sha256"),
        prefill=row.text("prefill_native_suffix_sha256"),
        incremental_cache_into_prefill=row.text("incremental_cache_into_prefill_suffix_sha256"),
        prefill_cache_into_incremental=row.text("prefill_cache_into_incremental_suffix_sha256"),
    )
    row.agree("baseline_divergent", suffixes.divergent)
    row.agree("incremental_cache_into_prefill_recovers_donor", suffixes.prefill_recipient_follows_donor)
    row.agree("prefill_cache_into_incremental_recovers_donor", suffixes.incremental_recipient_follows_donor)
    row.agree("exact_control_novel_trajectory", not suffixes.divergent and suffixes.novel)
    return suffixes
