"""Each ledger's line in the release's columns (the release "stage-replay-artifacts" v1.0.0).

What our ledger has no field for takes the release's meaning. `source_row_sha256`: the digest of our ledger's row.
`trace_equal`: the whole suffixes are equal. `answer_equal`: the answer blocks are equal token for token. `all_48_...`:
every layer. `checkpoint_alias`: C0 for the transplants, C1 for the replication.
"""

from collections.abc import Callable
from typing import Any

from experiments.run.designs import donor_rows
from minimodel.errors import refuse
from stats.donors import INTO_INCREMENTAL, INTO_PREFILL

Row = dict[str, Any]
Line = dict[str, object]
# the release's name of a pair of arms: ours, by the matrix's arms
AUDIT_PAIRS = {
    "live_replica": "live:live_replica",
    "live_prefill": "live:prefill",
    "prefill_replica": "prefill:prefill_replica",
}
# column of the audit's ledger: the gates that must all hold
AUDIT_FLAGS = {
    "prefix_commitment_equal": ("prefix",),
    "live_incremental_suffix_equal": ("suffix live:incremental",),
    "live_replica_suffix_equal": ("suffix live_replica:incremental_replica",),
    "prefill_suffix_equal": ("suffix prefill:prefill",),
    "prefill_replica_suffix_equal": ("suffix prefill_replica:prefill_replica",),
    "comparison_objects_equal": tuple(f"leaves comparison {pair}" for pair in AUDIT_PAIRS.values()),
    **{f"cache_{name}_fingerprint_equal": (f"leaves cache {pair}",) for name, pair in AUDIT_PAIRS.items()},
    **{f"logits_{name}_fingerprint_equal": (f"leaves logits {pair}",) for name, pair in AUDIT_PAIRS.items()},
}
AUDIT_LEAVES = {
    "cache_common_scalar_leaves_per_section": "cache",
    "logit_common_scalar_leaves_per_section": "logits",
}
STRATA = {"divergent": "divergent", "exact": "nondivergent_control", "": "not_used"}


def matrix_line(row: Row, dtype: str, left: str) -> Line:
    """A row of matched_live_prefill.csv (left "live") or fixed_prefix_2x2.csv (left "incremental")."""
    pair, arms = row["comparisons"][f"{left}:prefill"], row["arms"]
    replicas: Line = {}
    for arm in (left, "prefill"):
        one = row["comparisons"][f"{arm}:{arm}_replica"]
        replicas |= {f"{arm}_replica_{part}_exact": one[part]["exact"] for part in ("cache", "logits", "suffix")}
    cache, logits = pair["cache"], pair["logits"]
    norms = {f"cache_{name}_l2_norm": cache[f"{name}_l2"] for name in ("delta", "left", "right")}
    return {
        **_head(row),
        "precision": dtype,
        **_prefix(row),
        **replicas,
        "functional_state_equal": row["gates"]["functional_state"],
        "all_storage_disjoint": row["gates"]["storage_disjoint"],
        f"{left}_prefill_cache_exact": cache["exact"],
        "cache_max_abs_diff": cache["max_abs"],
        "cache_mean_abs_diff": cache["mean_abs"],
        **({**norms, "cache_relative_l2_diff": cache["relative_l2"]} if left == "incremental" else {}),
        f"{left}_prefill_logits_exact": logits["exact"],
        "logit_max_abs_diff": logits["max_abs"],
        "logit_mean_abs_diff": logits["mean_abs"],
        "boundary_argmax_equal": pair["argmax_equal"],
        **{
            f"{arm}_suffix_sha256": arms[arm]["suffix_sha256"]
            for arm in (left, f"{left}_replica", "prefill", "prefill_replica")
        },
        "suffix_equal": pair["suffix"]["exact"],
        "first_suffix_divergence_index": pair["suffix"]["first_divergence"],
        "trace_equal": pair["suffix"]["exact"],
        "merge_equal": pair["merge_equal"],
        "answer_equal": pair["answer_tokens_equal"],
        f"{left}_correct": arms[left]["correct"],
        "prefill_correct": arms["prefill"]["correct"],
        "integrity_pass": row["passed"],
    }


def bridge_line(row: Row) -> Line:
    """A row of live_teacher_bridge.csv; the release calls the incremental construction "teacher"."""
    pair, arms, saved = row["comparisons"]["live:incremental"], row["arms"], row["saved_prefix"]
    clones: Line = {}
    for arm, name in (("live", "live"), ("incremental", "teacher")):
        one = row["comparisons"][f"{arm}:{arm}_replica"]
        clones |= {f"{name}_clone_{part}_exact": one[part]["exact"] for part in ("cache", "logits")}
    return {
        **_head(row),
        "selection_index": row["index"],
        "new_prefix_token_count": row["prefix"]["length"],
        "new_prefix_sha256": row["prefix"]["sha256"],
        "historical_prefix_token_count": saved["length"],
        "historical_prefix_sha256": saved["sha256"],
        "live_matches_historical_prefix": saved["agrees"],
        "boundary_cache_sequence_len": row["boundary_length"],
        "post_decode_cache_sequence_len": arms["live"]["post_decode_length"],
        **clones,
        "functional_state_equal": row["gates"]["functional_state"],
        "all_storage_disjoint": row["gates"]["storage_disjoint"],
        "live_teacher_cache_exact": pair["cache"]["exact"],
        "live_teacher_logits_exact": pair["logits"]["exact"],
        "boundary_argmax_equal": pair["argmax_equal"],
        "live_suffix_sha256": arms["live"]["suffix_sha256"],
        "teacher_suffix_sha256": arms["incremental"]["suffix_sha256"],
        "live_teacher_suffix_exact": pair["suffix"]["exact"],
        "all_48_layers_exact": all(one[t]["exact"] for one in pair["cache"]["layers"] for t in ("key", "value")),
        "integrity_pass": row["passed"],
    }


def transplant_line(row: Row, alias: str, basis: str) -> Line:
    """A row of kv_transplant_primary.csv or kv_transplant_later.csv."""
    donor, gates = donor_rows([row])[0], row["gates"]
    arms = {"incremental_native": "incremental", "prefill_native": "prefill"}
    arms |= {name: name for name in (INTO_PREFILL, INTO_INCREMENTAL)}
    return {
        **_head(row),
        "checkpoint_alias": alias,
        "selection_index": row["index"],
        "selection_basis": basis,
        "historical_stratum": STRATA[row.get("stratum", "")],
        "historical_stratum_reproduced": row.get("stratum_reproduced", True),
        **_prefix(row),
        "incremental_replica_exact": gates["replica_incremental"],
        "prefill_replica_exact": gates["replica_prefill"],
        "functional_state_equal": gates["functional_state"],
        "boundary_argmax_equal": gates["raw_argmax"],
        "all_storage_disjoint": gates["storage_disjoint"],
        "all_48_layer_pairs_transplanted": all(
            gates[f"provenance_{name}"] for name in (INTO_PREFILL, INTO_INCREMENTAL)
        ),
        **{f"{name}_suffix_sha256": row["arms"][arm]["suffix_sha256"] for name, arm in arms.items()},
        "baseline_divergent": donor.divergent,
        **{f"{arm}_recovers_donor": side == "donor" for arm, side in donor.sides.items()},
        "bidirectional_donor_recovery": donor.recovers_both,
        "exact_control_novel_trajectory": not donor.divergent and donor.novel,
        "integrity_pass": row["passed"],
    }


def audit_line(row: Row) -> Line:
    """A row of historical_bridge_audit.csv: the join of a matrix and a fixed_prefix run. InputError for another."""
    if row["joined"].get("live") != "incremental":
        raise refuse(f"audit row {row['row']}: live arm joined with", "incremental", row["joined"].get("live"))
    return {
        "row_id": row["row"],
        "source_live_row_sha256": row["left_row_sha256"],
        "source_incremental_row_sha256": row["right_row_sha256"],
        **{column: all(row["gates"][gate] for gate in gates) for column, gates in AUDIT_FLAGS.items()},
        **{column: audit_leaves(row, part) for column, part in AUDIT_LEAVES.items()},
        "audit_pass": row["passed"],
    }


def audit_leaves(row: Row, part: str) -> int:
    """Returns the scalar leaves that every section of this part shares. InputError where sections differ in it."""
    counts = {row["leaves"][f"{part} {pair}"]["scalars"] for pair in AUDIT_PAIRS.values()}
    if len(counts) != 1:
        raise refuse(f"audit row {row['row']}: scalar leaves per {part} section", "one number", sorted(counts))
    return int(counts.pop())


def control_line(row: Row) -> Line:
    """A row of stock_qwen_control.csv: the control on a stock checkpoint, as the release's is."""
    replica, pair = (row["comparisons"][name] for name in ("pair:pair_replica", "singleton:pair"))
    parts = ("tokens", "logprobs")
    return {
        **_head(row),
        "selection_index": row["index"],
        "input_token_count": row["input"]["length"],
        **{f"pair_replica_{part}_exact": replica[part]["exact"] for part in parts},
        **{f"singleton_pair_{part}_exact": pair[part]["exact"] for part in parts},
        "first_token_divergence_index": pair["tokens"]["first_divergence"],
        "first_logprob_divergence_index": pair["logprobs"]["first_divergence"],
        "singleton_output_token_count": len(row["arms"]["singleton"]["tokens"]),
        "paired_output_token_count": len(row["arms"]["pair"]["tokens"]),
        "max_abs_aligned_selected_token_logprob_difference": pair["logprobs"]["max_abs_aligned"],
    }


def _head(row: Row) -> Line:
    return {"row_id": row["row"], "source_row_sha256": row["row_sha256"]}


def _prefix(row: Row) -> Line:
    return {"prefix_token_count": row["prefix"]["length"], "prefix_sha256": row["prefix"]["sha256"]}


# experiment: (file, line of a row in a dtype)
FILES: dict[str, tuple[str, Callable[[Row, str], Line]]] = {
    "matrix": ("matched_live_prefill.csv", lambda row, dtype: matrix_line(row, dtype, "live")),
    "fixed_prefix": ("fixed_prefix_2x2.csv", lambda row, dtype: matrix_line(row, dtype, "incremental")),
    "bridge": ("live_teacher_bridge.csv", lambda row, _: bridge_line(row)),
    "transplant": (
        "kv_transplant_primary.csv",
        lambda row, _: transplant_line(row, "C0", "prior_outcome_stratified_length_spread"),
    ),
    "replication": (
        "kv_transplant_later.csv",
        lambda row, _: transplant_line(row, "C1", "outcome_blind_length_and_identifier"),
    ),
    "audit": ("historical_bridge_audit.csv", lambda row, _: audit_line(row)),
    "stock_control": ("stock_qwen_control.csv", lambda row, _: control_line(row)),
}
