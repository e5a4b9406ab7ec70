"""The columns of the release "stage-replay-artifacts" v1.0.0, and where our ledger rows keep what they name.

What our ledger has no field for takes the release's meaning. `source_row_sha256`: the digest of our ledger's row.
`trace_equal`: the whole suffixes are equal. `answer_equal`: the answer blocks are equal token for token. `all_48_...`:
every layer. `checkpoint_alias`: C0 for the transplants, C1 for the replication.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from minimodel.errors import refuse
from stats.donors import DONORS

Row = Mapping[str, Any]
Names = dict[str, str | Callable[[Any], object]]  # the release's name: a path into our row, or a function of it


def pick(row: Row, names: Names) -> dict[str, Any]:
    """Returns what the names stand for in a ledger row."""
    return {
        name: place(row) if callable(place) else reduce(getitem, place.split("."), row) for name, place in names.items()
    }


_PARTS = ("cache", "logits", "suffix")
_HEAD: Names = {"row_id": "row", "source_row_sha256": "row_sha256"}
_PREFIX: Names = {"prefix_token_count": "prefix.length", "prefix_sha256": "prefix.sha256"}
_STATE: Names = {"functional_state_equal": "gates.functional_state", "all_storage_disjoint": "gates.storage_disjoint"}


def _matrix_columns(left: str) -> Names:
    """Returns the columns of matched_live_prefill.csv (left "live") or fixed_prefix_2x2.csv (left "incremental")."""
    pair, both = f"comparisons.{left}:prefill", (left, "prefill")
    norms: Names = {f"cache_{name}_l2_norm": f"{pair}.cache.{name}_l2" for name in ("delta", "left", "right")}
    norms["cache_relative_l2_diff"] = f"{pair}.cache.relative_l2"
    arms = [f"{arm}{replica}" for arm in both for replica in ("", "_replica")]
    return {
        **_HEAD,
        "precision": "dtype",
        **_PREFIX,
        **{f"{a}_replica_{part}_exact": f"comparisons.{a}:{a}_replica.{part}.exact" for a in both for part in _PARTS},
        **_STATE,
        f"{left}_prefill_cache_exact": f"{pair}.cache.exact",
        **{f"cache_{size}_diff": f"{pair}.cache.{size}" for size in ("max_abs", "mean_abs")},
        **(norms if left == "incremental" else {}),
        f"{left}_prefill_logits_exact": f"{pair}.logits.exact",
        **{f"logit_{size}_diff": f"{pair}.logits.{size}" for size in ("max_abs", "mean_abs")},
        "boundary_argmax_equal": f"{pair}.argmax_equal",
        **{f"{arm}_suffix_sha256": f"arms.{arm}.suffix_sha256" for arm in arms},
        "suffix_equal": f"{pair}.suffix.exact",
        "first_suffix_divergence_index": f"{pair}.suffix.first_divergence",
        "trace_equal": f"{pair}.suffix.exact",
        "merge_equal": f"{pair}.merge_equal",
        "answer_equal": f"{pair}.answer_tokens_equal",
        **{f"{arm}_correct": f"arms.{arm}.correct" for arm in both},
        "integrity_pass": "passed",
    }


_TEACHER = {"live": "live", "incremental": "teacher"}  # the release calls the incremental construction "teacher"
_LIVE_TEACHER = "comparisons.live:incremental"
_BRIDGE: Names = {
    **_HEAD,
    "selection_index": "index",
    "new_prefix_token_count": "prefix.length",
    "new_prefix_sha256": "prefix.sha256",
    "historical_prefix_token_count": "saved_prefix.length",
    "historical_prefix_sha256": "saved_prefix.sha256",
    "live_matches_historical_prefix": "saved_prefix.agrees",
    "boundary_cache_sequence_len": "boundary_length",
    "post_decode_cache_sequence_len": "arms.live.post_decode_length",
    **{
        f"{name}_clone_{part}_exact": f"comparisons.{arm}:{arm}_replica.{part}.exact"
        for arm, name in _TEACHER.items()
        for part in _PARTS[:2]
    },
    **_STATE,
    **{f"live_teacher_{part}_exact": f"{_LIVE_TEACHER}.{part}.exact" for part in _PARTS[:2]},
    "boundary_argmax_equal": f"{_LIVE_TEACHER}.argmax_equal",
    **{f"{name}_suffix_sha256": f"arms.{arm}.suffix_sha256" for arm, name in _TEACHER.items()},
    "live_teacher_suffix_exact": f"{_LIVE_TEACHER}.suffix.exact",
    "all_48_layers_exact": f"{_LIVE_TEACHER}.cache.exact",
    "integrity_pass": "passed",
}
_STRATA = {"divergent": "divergent", "exact": "nondivergent_control", "": "not_used"}


def _transplant_columns(alias: str, basis: str) -> Names:
    """Returns the columns of kv_transplant_primary.csv or kv_transplant_later.csv."""
    arms = {"incremental_native": "incremental", "prefill_native": "prefill", **{arm: arm for arm in DONORS}}
    return {
        **_HEAD,
        "checkpoint_alias": lambda row: alias,
        "selection_index": "index",
        "selection_basis": lambda row: basis,
        "historical_stratum": lambda row: _STRATA[row.get("stratum", "")],
        "historical_stratum_reproduced": lambda row: row.get("stratum_reproduced", True),
        **_PREFIX,
        "incremental_replica_exact": "gates.replica_incremental",
        "prefill_replica_exact": "gates.replica_prefill",
        "functional_state_equal": "gates.functional_state",
        "boundary_argmax_equal": "gates.raw_argmax",
        "all_storage_disjoint": "gates.storage_disjoint",
        "all_48_layer_pairs_transplanted": lambda row: all(row["gates"][f"provenance_{arm}"] for arm in DONORS),
        **{f"{name}_suffix_sha256": f"arms.{arm}.suffix_sha256" for name, arm in arms.items()},
        "baseline_divergent": "donor.divergent",
        **{f"{arm}_recovers_donor": f"donor.{arm}_recovers" for arm in DONORS},
        "bidirectional_donor_recovery": "donor.recovers_both",
        "exact_control_novel_trajectory": lambda row: not row["donor"]["divergent"] and row["donor"]["novel"],
        "integrity_pass": "passed",
    }


# the release's name of a pair of arms: ours, by the matrix's arms
_AUDIT_PAIRS = {
    "live_replica": "live:live_replica",
    "live_prefill": "live:prefill",
    "prefill_replica": "prefill:prefill_replica",
}


def _leaves(row: Row, part: str) -> object:
    """Returns the scalar leaves that every section of this part shares. InputError where sections differ in it."""
    first, *others = sorted({row["leaves"][f"{part} {pair}"]["scalars"] for pair in _AUDIT_PAIRS.values()})
    if others:
        raise refuse(f"audit row {row['row']}: scalar leaves per {part} section", "one number", [first, *others])
    return first


def _bridged(row: Row) -> object:
    """Returns the row's id. InputError unless the audit joined a matrix with a fixed_prefix run."""
    if row["joined"].get("live") != "incremental":
        raise refuse(f"audit row {row['row']}: live arm joined with", "incremental", row["joined"].get("live"))
    return row["row"]


_AUDIT: Names = {
    "row_id": _bridged,
    "source_live_row_sha256": "left_row_sha256",
    "source_incremental_row_sha256": "right_row_sha256",
    "prefix_commitment_equal": "gates.prefix",
    "live_incremental_suffix_equal": "gates.suffix live:incremental",
    "live_replica_suffix_equal": "gates.suffix live_replica:incremental_replica",
    "prefill_suffix_equal": "gates.suffix prefill:prefill",
    "prefill_replica_suffix_equal": "gates.suffix prefill_replica:prefill_replica",
    "comparison_objects_equal": lambda row: all(
        row["gates"][f"leaves comparison {pair}"] for pair in _AUDIT_PAIRS.values()
    ),
    **{
        f"{part}_{name}_fingerprint_equal": f"gates.leaves {part} {pair}"
        for part in _PARTS[:2]
        for name, pair in _AUDIT_PAIRS.items()
    },
    "cache_common_scalar_leaves_per_section": lambda row: _leaves(row, "cache"),
    "logit_common_scalar_leaves_per_section": lambda row: _leaves(row, "logits"),
    "audit_pass": "passed",
}
_SINGLE = "comparisons.singleton:pair"
_CONTROL: Names = {
    **_HEAD,
    "selection_index": "index",
    "input_token_count": "input.length",
    **{f"pair_replica_{part}_exact": f"comparisons.pair:pair_replica.{part}.exact" for part in ("tokens", "logprobs")},
    **{f"singleton_pair_{part}_exact": f"{_SINGLE}.{part}.exact" for part in ("tokens", "logprobs")},
    **{f"first_{part}_divergence_index": f"{_SINGLE}.{part}s.first_divergence" for part in ("token", "logprob")},
    "singleton_output_token_count": lambda row: len(row["arms"]["singleton"]["tokens"]),
    "paired_output_token_count": lambda row: len(row["arms"]["pair"]["tokens"]),
    "max_abs_aligned_selected_token_logprob_difference": f"{_SINGLE}.logprobs.max_abs_aligned",
}
# experiment: (file, its columns); a row of fixed_prefix or a matrix gets its run's dtype
FILES: dict[str, tuple[str, Names]] = {
    "matrix": ("matched_live_prefill.csv", _matrix_columns("live")),
    "fixed_prefix": ("fixed_prefix_2x2.csv", _matrix_columns("incremental")),
    "bridge": ("live_teacher_bridge.csv", _BRIDGE),
    "transplant": ("kv_transplant_primary.csv", _transplant_columns("C0", "prior_outcome_stratified_length_spread")),
    "replication": ("kv_transplant_later.csv", _transplant_columns("C1", "outcome_blind_length_and_identifier")),
    "audit": ("historical_bridge_audit.csv", _AUDIT),
    "stock_control": ("stock_qwen_control.csv", _CONTROL),
}
