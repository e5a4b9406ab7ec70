"""A small release in the published format, with claims computed by other means than in `stats`."""

import csv
import hashlib
import json
import math
import random

import numpy as np
from scipy.stats import binom

ROWS = 40
PAIRS = ("live_replica", "live_prefill", "prefill_replica")
AUDIT_FLAGS = [
    *("prefix_commitment_equal", "live_incremental_suffix_equal", "live_replica_suffix_equal"),
    *("prefill_suffix_equal", "prefill_replica_suffix_equal", "comparison_objects_equal"),
    *(f"{kind}_{pair}_fingerprint_equal" for kind in ("cache", "logits") for pair in PAIRS),
]
AUDIT_LEAVES = {"cache_common_scalar_leaves_per_section": 90, "logit_common_scalar_leaves_per_section": 5}
STATE = ("functional_state_equal", "all_storage_disjoint")
DIRECTIONS = ("incremental_cache_into_prefill", "prefill_cache_into_incremental")
SIZES = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")
STREAMS = {
    **{"accuracy_difference_of_differences": 30, "cross_answer": 21, "cross_correctness": 22, "cross_logits": 23},
    **{"cross_suffix": 20, "fixed_bf16": 100, "fixed_fp32": 101, "matched_bf16": 0, "matched_fp32": 1},
}
Z = {"matrix_wilson_z": 1.96, "transplant_wilson_z": 1.959963984540054}
PLAN = {"uncertainty": {"bootstrap_seed": 20260728, "bootstrap_streams": STREAMS, **Z}}


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
    (directory / "paper_claims.json").write_text(json.dumps(_claims(files)))
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


# -- claims -----------------------------------------------------------------------------------------------------------
def _rate(flags, z=1.96):
    k, n = sum(flags), len(flags)
    if n == 0:
        return {"count": 0, "n": 0, "rate": None, "wilson_95_ci": [None, None]}
    p = k / n
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    low, high = 0.0 if k == 0 else max(0.0, center - half), 1.0 if k == n else min(1.0, center + half)
    return {"count": k, "n": n, "rate": p, "wilson_95_ci": [low, high]}


def _bootstrap(differences, stream):
    generator, values = np.random.default_rng(20260728 + stream), np.array(differences, dtype=float)
    blocks = [values[generator.integers(0, len(values), (1000, len(values)))].mean(1) for _ in range(20)]
    return [float(q) for q in np.percentile(np.concatenate(blocks) * 100.0, [2.5, 97.5])]


def _mcnemar(b, c):
    """Twice the binomial tail, as the distribution at 1/2 is symmetric."""
    return 1.0 if b == c else float(2 * binom.cdf(min(b, c), b + c, 0.5))


def _column(rows, name):
    return [row[name] for row in rows]


def _differences(low, high):
    return [int(y) - int(x) for x, y in zip(low, high, strict=True)]


def _matrix_claims(rows, left, stream):
    a, b = _column(rows, f"{left}_correct"), _column(rows, "prefill_correct")
    found = [i for i in _column(rows, "first_suffix_divergence_index") if i is not None]
    change = _differences(a, b)
    gates = (f"{left}_replica_exact", "prefill_replica_exact", *STATE, "integrity_pass")
    return {
        "rows": ROWS,
        **{f"{gate}_rows": ROWS for gate in gates},
        "cache_exact_rows": sum(_column(rows, f"{left}_prefill_cache_exact")),
        "logits_exact_rows": sum(_column(rows, f"{left}_prefill_logits_exact")),
        "immediate_argmax_different_rows": ROWS - sum(_column(rows, "boundary_argmax_equal")),
        **{
            f"{name}_disagreement": _rate([not x for x in _column(rows, f"{name}_equal")])
            for name in ("suffix", "trace", "merge", "answer")
        },
        "correctness_label_disagreement": _rate([x != 0 for x in change]),
        "first_divergence": {
            **{"n": len(found), "median": float(np.median(found))},
            **{"min": float(min(found)), "max": float(max(found))},
        },
        "first_token_divergence_rows": found.count(0),
        f"{left}_correct": sum(a),
        "prefill_correct": sum(b),
        f"{left}_only_correct": change.count(-1),
        "prefill_only_correct": change.count(1),
        "accuracy_delta_prefill_minus_left_pp": float(np.mean(change)) * 100,
        "accuracy_paired_bootstrap_95_ci_pp": _bootstrap(change, stream),
        "mcnemar_exact_two_sided_p": _mcnemar(change.count(-1), change.count(1)),
        **{f"{name}_median": float(np.median(_column(rows, name))) for name in SIZES},
    }


def _reduction(low, high, stream):
    change = _differences(low, high)
    return {
        **{"bf16_count": sum(low), "fp32_count": sum(high)},
        **{"bf16_only": change.count(-1), "fp32_only": change.count(1)},
        **_effect(change, stream),
        "mcnemar_exact_two_sided_p": _mcnemar(change.count(-1), change.count(1)),
    }


def _effect(change, stream):
    delta = float(np.mean(change)) * 100
    return {"delta_fp32_minus_bf16_pp": delta, "paired_bootstrap_95_ci_pp": _bootstrap(change, stream)}


def _cross(low, high):
    effects = [
        _differences(_column(rows, "incremental_correct"), _column(rows, "prefill_correct")) for rows in (low, high)
    ]
    flags = {"suffix_mismatch": ("suffix_equal", 20), "answer_mismatch": ("answer_equal", 21)}
    flags["logits_mismatch"] = ("incremental_prefill_logits_exact", 23)
    return {
        "accuracy_effect_difference": _effect(_differences(*effects), 30),
        "correctness_flip": _reduction(*([x != 0 for x in effect] for effect in effects), 22),
        **{
            name: _reduction(*([not x for x in _column(rows, column)] for rows in (low, high)), stream)
            for name, (column, stream) in flags.items()
        },
    }


def _transplant_claims(rows):
    z = Z["transplant_wilson_z"]
    divergent, exact = ([row for row in rows if row["baseline_divergent"] is flag] for flag in (True, False))
    recovered = {name: _column(divergent, f"{name}_recovers_donor") for name in DIRECTIONS}
    return {
        "rows": len(rows),
        "integrity_pass_rows": len(rows),
        "baseline_divergence": _rate(_column(rows, "baseline_divergent"), z),
        "baseline_exact_rows": len(exact),
        **{f"{name}_donor_recovery": _rate(flags, z) for name, flags in recovered.items()},
        "bidirectional_donor_recovery": _rate([all(pair) for pair in zip(*recovered.values(), strict=True)], z),
        "exact_control_novel_trajectory": _rate(_column(exact, "exact_control_novel_trajectory"), z),
    }


def _matrix_block(table, left, stream):
    low, high = ([row for row in table if row["precision"] == precision] for precision in ("bf16", "fp32"))
    equal = sum(a["prefix_sha256"] == b["prefix_sha256"] for a, b in zip(low, high, strict=True))
    blocks = {"bf16": _matrix_claims(low, left, stream), "fp32": _matrix_claims(high, left, stream + 1)}
    if left == "live":
        return {**blocks, "cross_precision_prefix_exact_rows": equal}
    for block, rows in zip(blocks.values(), (low, high), strict=True):
        block["cache_relative_l2_diff_median"] = float(np.median(_column(rows, "cache_relative_l2_diff")))
    return {**blocks, "cross_precision_prefix_exact_rows": equal, "cross_precision": _cross(low, high)}


def _bridge_claims(rows):
    exact = [f"live_teacher_{part}_exact" for part in ("cache", "logits", "suffix")]
    lengths = {age: _column(rows, f"{age}_prefix_token_count") for age in ("new", "historical")}
    ranges = {f"{age}_prefix_length_range": [min(found), max(found)] for age, found in lengths.items()}
    counts = {f"{name}_rows": 3 for name in (*exact, "all_48_layers_exact", "integrity_pass")}
    return {"rows": 3, "live_matches_historical_prefix_rows": 1, **counts, **ranges}


def _claims(files):
    """The claims of the seven files, by name."""
    pair, single = "pair_replica_{}_exact_rows", "singleton_pair_{}_exact_rows"
    stock = {pair.format("token"): 5, pair.format("logprob"): 4, single.format("token"): 3, single.format("logprob"): 1}
    audit = {"audit_pass_rows": ROWS, **{f"{flag}_rows": ROWS for flag in AUDIT_FLAGS}, **AUDIT_LEAVES}
    return {
        "schema": "stage-replay-paper-claims-v1",
        "matched_live_prefill": _matrix_block(files["matched_live_prefill.csv"], "live", 0),
        "fixed_prefix_2x2": _matrix_block(files["fixed_prefix_2x2.csv"], "incremental", 100),
        "prospective_bridge": _bridge_claims(files["live_teacher_bridge.csv"]),
        "historical_bridge": {"rows": ROWS, **audit},
        "transplant_primary": _transplant_claims(files["kv_transplant_primary.csv"]),
        "transplant_later": _transplant_claims(files["kv_transplant_later.csv"]),
        "stock_qwen_diagnostic": {"rows": 5, **stock},
    }
