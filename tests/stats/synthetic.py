"""A small release in the published format, whose claims are recomputed from its rows."""

import csv
import hashlib
import json
import random

from stats.published.claims import SCHEMA, recomputed

ROWS = 40
STREAMS = {
    **{"accuracy_difference_of_differences": 30, "cross_answer": 21, "cross_correctness": 22, "cross_logits": 23},
    **{"cross_suffix": 20, "fixed_bf16": 100, "fixed_fp32": 101, "matched_bf16": 0, "matched_fp32": 1},
}
Z = {"matrix_wilson_z": 1.96, "transplant_wilson_z": 1.959963984540054}
PLAN = {"uncertainty": {"bootstrap_seed": 20260728, "bootstrap_streams": STREAMS, **Z}}
PAIRS = ("live_replica", "live_prefill", "prefill_replica")
AUDIT_FLAGS = [
    *("prefix_commitment_equal", "live_incremental_suffix_equal", "live_replica_suffix_equal"),
    *("prefill_suffix_equal", "prefill_replica_suffix_equal", "comparison_objects_equal"),
    *(f"{kind}_{pair}_fingerprint_equal" for kind in ("cache", "logits") for pair in PAIRS),
]
AUDIT_LEAVES = {"cache_common_scalar_leaves_per_section": 90, "logit_common_scalar_leaves_per_section": 5}
STATE = ("functional_state_equal", "all_storage_disjoint")
SIZES = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")


def write_release(directory):
    """Writes the seven ledgers, the plan and the claims; returns `directory`."""
    (directory / "data").mkdir(parents=True)
    matched, fixed = _matrix("live", 1), _matrix("incremental", 2)
    bank = [row for row in matched if row["precision"] == "bf16"]
    lengths = sorted((row["prefix_token_count"], row["row_id"]) for row in bank)
    parted = {row["row_id"] for row in bank if not row["suffix_equal"]}
    divergent, exact = ([item for item in lengths if (item[1] in parted) is flag] for flag in (True, False))
    primary = [*divergent[:: len(divergent) - 1], *exact[:: len(exact) - 1]]
    files = {
        "matched_live_prefill.csv": matched,
        "fixed_prefix_2x2.csv": fixed,
        "kv_transplant_primary.csv": [_transplant(i, item, item in divergent, 0) for i, item in enumerate(primary)],
        "kv_transplant_later.csv": [
            _transplant(i, lengths[place], i != 1, i) for i, place in enumerate((0, 13, 26, 39))
        ],
        "live_teacher_bridge.csv": [_bridge(i, lengths[place]) for i, place in enumerate((0, 20, 39))],
        "historical_bridge_audit.csv": [
            {"row_id": f"r{i:04d}", **dict.fromkeys(AUDIT_FLAGS, True), **AUDIT_LEAVES, "audit_pass": True}
            for i in range(ROWS)
        ],
        "stock_qwen_control.csv": [_stock(i) for i in range(5)],
    }
    for name, rows in files.items():
        with (directory / "data" / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({column: _cell(value) for column, value in row.items()} for row in rows)
    (directory / "analysis_plan.json").write_text(json.dumps(PLAN))
    (directory / "paper_claims.json").write_text(json.dumps({"schema": SCHEMA, **recomputed(directory / "data")}))
    return directory


def _cell(value):
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def _digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# -- rows -------------------------------------------------------------------------------------------------------------
def _matrix(left, seed):
    draw = random.Random(seed)
    return [_matrix_row(left, precision, i, draw) for precision in ("bf16", "fp32") for i in range(ROWS)]


def _matrix_row(left, precision, i, draw):
    equal = draw.random() < (0.3 if precision == "bf16" else 0.9)
    answer_equal = equal or draw.random() < 0.5
    correct = draw.random() < 0.5
    own = _digest(left, precision, i)
    other = own if equal else _digest("prefill", precision, i)
    norms = {"cache_left_l2_norm": 30.0 + draw.random(), "cache_right_l2_norm": 30.0 + draw.random()}
    delta = draw.random()
    gates = [f"{arm}_replica_{part}_exact" for arm in (left, "prefill") for part in ("cache", "logits", "suffix")]
    return {
        "row_id": f"r{i:04d}",
        "precision": precision,
        "prefix_token_count": 100 + 7 * i % 97 * 50 + i,
        "prefix_sha256": _digest("prefix", i, precision if left == "live" and i % 4 else ""),
        **dict.fromkeys([*gates, *STATE], True),
        f"{left}_prefill_cache_exact": draw.random() < 0.1,
        f"{left}_prefill_logits_exact": draw.random() < 0.2,
        **{name: draw.random() for name in SIZES},
        **norms,
        "cache_delta_l2_norm": delta,
        "cache_relative_l2_diff": delta / max(norms.values()),
        "boundary_argmax_equal": draw.random() < 0.9,
        **dict.fromkeys((f"{left}_suffix_sha256", f"{left}_replica_suffix_sha256"), own),
        **dict.fromkeys(("prefill_suffix_sha256", "prefill_replica_suffix_sha256"), other),
        "suffix_equal": equal,
        "first_suffix_divergence_index": None if equal else draw.randrange(50),
        "trace_equal": equal,
        "merge_equal": equal or draw.random() < 0.2,
        "answer_equal": answer_equal,
        f"{left}_correct": correct,
        "prefill_correct": correct if answer_equal else draw.random() < 0.5,
        "integrity_pass": True,
    }


def _transplant(index, item, divergent, fault):
    """`fault` 3: the incremental recipient keeps its own trajectory; `fault` 1 on an exact row: a third trajectory."""
    incremental, prefill = _digest(item, "i"), _digest(item, "p" if divergent else "i")
    back = incremental if divergent and fault == 3 else prefill
    back = _digest(item, "third") if not divergent and fault == 1 else back
    gates = ("incremental_replica_exact", "prefill_replica_exact", "boundary_argmax_equal")
    return {
        "row_id": item[1],
        "selection_index": index,
        "historical_stratum": "divergent" if divergent else "nondivergent_control",
        "prefix_token_count": item[0],
        **dict.fromkeys((*gates, *STATE, "all_48_layer_pairs_transplanted"), True),
        "incremental_native_suffix_sha256": incremental,
        "prefill_native_suffix_sha256": prefill,
        "incremental_cache_into_prefill_suffix_sha256": incremental,
        "prefill_cache_into_incremental_suffix_sha256": back,
        "baseline_divergent": divergent,
        "incremental_cache_into_prefill_recovers_donor": True,
        "prefill_cache_into_incremental_recovers_donor": back == prefill,
        "exact_control_novel_trajectory": not divergent and back != prefill,
        "integrity_pass": True,
    }


def _bridge(index, item):
    parts = ("cache", "logits")
    flags = [
        f"{name}_exact"
        for arm in ("live_clone", "teacher_clone", "live_teacher")
        for name in (f"{arm}_{p}" for p in parts)
    ]
    return {
        "row_id": item[1],
        "selection_index": index,
        "new_prefix_token_count": item[0] + 3,
        "new_prefix_sha256": _digest("new", index),
        "historical_prefix_token_count": item[0],
        "historical_prefix_sha256": _digest("new" if index == 0 else "old", index),
        "live_matches_historical_prefix": index == 0,
        **dict.fromkeys((*flags, *STATE, "all_48_layers_exact", "live_teacher_suffix_exact", "integrity_pass"), True),
        **dict.fromkeys(("live_suffix_sha256", "teacher_suffix_sha256"), _digest("suffix", index)),
    }


def _stock(index):
    return {
        "row_id": f"r{index:04d}",
        "pair_replica_tokens_exact": True,
        "pair_replica_logprobs_exact": index != 4,
        "singleton_pair_tokens_exact": index % 2 == 0,
        "singleton_pair_logprobs_exact": index == 0,
        "first_token_divergence_index": None if index % 2 == 0 else 7,
        "first_logprob_divergence_index": None if index == 0 else 0,
    }
