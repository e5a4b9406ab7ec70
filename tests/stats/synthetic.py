"""A small release in the published format, made from a seed; its claims are computed here by other means than in `stats`."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from pathlib import Path

import numpy as np
from scipy.stats import binom

ROWS = 40
PLAN = {
    "uncertainty": {
        "bootstrap_seed": 20260728,
        "bootstrap_streams": {
            "accuracy_difference_of_differences": 30,
            "cross_answer": 21,
            "cross_correctness": 22,
            "cross_logits": 23,
            "cross_suffix": 20,
            "fixed_bf16": 100,
            "fixed_fp32": 101,
            "matched_bf16": 0,
            "matched_fp32": 1,
        },
        "matrix_wilson_z": 1.96,
        "transplant_wilson_z": 1.959963984540054,
    }
}


def write_release(directory: Path) -> Path:
    """Write the seven ledgers, the plan and the claims; returns `directory`."""
    (directory / "data").mkdir(parents=True)
    matched, fixed = _matrix("live", 1), _matrix("incremental", 2)
    lengths = sorted((int(row["prefix_token_count"]), row["row_id"]) for row in matched if row["precision"] == "bf16")
    divergent = {row["row_id"] for row in matched if row["precision"] == "bf16" and row["suffix_equal"] == "false"}
    strata = {
        True: [item for item in lengths if item[1] in divergent],
        False: [item for item in lengths if item[1] not in divergent],
    }
    primary = [_transplant(i, item, True, 0) for i, item in enumerate(strata[True][:: len(strata[True]) - 1])]
    primary += [_transplant(2 + i, item, False, 0) for i, item in enumerate(strata[False][:: len(strata[False]) - 1])]
    later = [_transplant(i, lengths[position], i != 1, i) for i, position in enumerate((0, 13, 26, 39))]
    files = {
        "matched_live_prefill.csv": matched,
        "fixed_prefix_2x2.csv": fixed,
        "kv_transplant_primary.csv": primary,
        "kv_transplant_later.csv": later,
        "live_teacher_bridge.csv": [_bridge(i, lengths[position]) for i, position in enumerate((0, 20, 39))],
        "historical_bridge_audit.csv": [_audit(f"r{i:04d}") for i in range(ROWS)],
        "stock_qwen_control.csv": [_stock(i) for i in range(5)],
    }
    for name, rows in files.items():
        with (directory / "data" / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    (directory / "analysis_plan.json").write_text(json.dumps(PLAN))
    (directory / "paper_claims.json").write_text(json.dumps(_claims(files)))
    return directory


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _matrix(left: str, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    rows = []
    for precision in ("bf16", "fp32"):
        for i in range(ROWS):
            equal = draw.random() < (0.3 if precision == "bf16" else 0.9)
            a, b = draw.random() < 0.5, draw.random() < 0.5
            answer_equal = equal or draw.random() < 0.5
            b = a if answer_equal else b
            own, other = _digest(left, precision, i), _digest("prefill", precision, i)
            norms = 30.0 + draw.random(), 30.0 + draw.random(), draw.random()
            row = {"row_id": f"r{i:04d}", "precision": precision, "prefix_token_count": str(100 + 7 * i % 97 * 50 + i)}
            row["prefix_sha256"] = _digest("prefix", i, precision if left == "live" and i % 4 else "")
            for arm in (left, "prefill"):
                row |= {f"{arm}_replica_{part}_exact": "true" for part in ("cache", "logits", "suffix")}
            row |= {
                "functional_state_equal": "true",
                "all_storage_disjoint": "true",
                f"{left}_prefill_cache_exact": _flag(draw.random() < 0.1),
                f"{left}_prefill_logits_exact": _flag(draw.random() < 0.2),
                **{
                    f"{name}_diff": repr(draw.random())
                    for name in ("cache_max_abs", "cache_mean_abs", "logit_max_abs", "logit_mean_abs")
                },
                "cache_left_l2_norm": repr(norms[0]),
                "cache_right_l2_norm": repr(norms[1]),
                "cache_delta_l2_norm": repr(norms[2]),
                "cache_relative_l2_diff": repr(norms[2] / max(norms[:2])),
                "boundary_argmax_equal": _flag(draw.random() < 0.9),
                f"{left}_suffix_sha256": own,
                f"{left}_replica_suffix_sha256": own,
                "prefill_suffix_sha256": own if equal else other,
                "prefill_replica_suffix_sha256": own if equal else other,
                "suffix_equal": _flag(equal),
                "first_suffix_divergence_index": "" if equal else str(draw.randrange(50)),
                "trace_equal": _flag(equal),
                "merge_equal": _flag(equal or draw.random() < 0.2),
                "answer_equal": _flag(answer_equal),
                f"{left}_correct": _flag(a),
                "prefill_correct": _flag(b),
                "integrity_pass": "true",
            }
            rows.append(row)
    return rows


def _transplant(index: int, item: tuple[int, str], divergent: bool, fault: int) -> dict[str, str]:
    """`fault` 3 makes the incremental recipient keep its own trajectory; `fault` 1 on an exact row a third trajectory."""
    incremental, prefill = _digest(item, "i"), _digest(item, "p" if divergent else "i")
    back = (
        incremental if divergent and fault == 3 else _digest(item, "third") if not divergent and fault == 1 else prefill
    )
    gates = ("incremental_replica_exact", "prefill_replica_exact", "functional_state_equal", "boundary_argmax_equal")
    return {
        "row_id": item[1],
        "selection_index": str(index),
        "historical_stratum": "divergent" if divergent else "nondivergent_control",
        "prefix_token_count": str(item[0]),
        **dict.fromkeys((*gates, "all_storage_disjoint", "all_48_layer_pairs_transplanted"), "true"),
        "incremental_native_suffix_sha256": incremental,
        "prefill_native_suffix_sha256": prefill,
        "incremental_cache_into_prefill_suffix_sha256": incremental,
        "prefill_cache_into_incremental_suffix_sha256": back,
        "baseline_divergent": _flag(divergent),
        "incremental_cache_into_prefill_recovers_donor": "true",
        "prefill_cache_into_incremental_recovers_donor": _flag(back == prefill),
        "exact_control_novel_trajectory": _flag(not divergent and back != prefill),
        "integrity_pass": "true",
    }


def _bridge(index: int, item: tuple[int, str]) -> dict[str, str]:
    flags = (
        "live_clone_cache_exact",
        "live_clone_logits_exact",
        "teacher_clone_cache_exact",
        "teacher_clone_logits_exact",
    )
    more = ("functional_state_equal", "all_storage_disjoint", "live_teacher_cache_exact", "live_teacher_logits_exact")
    return {
        "row_id": item[1],
        "selection_index": str(index),
        "new_prefix_token_count": str(item[0] + 3),
        "new_prefix_sha256": _digest("new", index),
        "historical_prefix_token_count": str(item[0]),
        "historical_prefix_sha256": _digest("new", index) if index == 0 else _digest("old", index),
        "live_matches_historical_prefix": _flag(index == 0),
        **dict.fromkeys((*flags, *more, "all_48_layers_exact", "live_teacher_suffix_exact", "integrity_pass"), "true"),
        "live_suffix_sha256": _digest("suffix", index),
        "teacher_suffix_sha256": _digest("suffix", index),
    }


AUDIT_FLAGS = [
    "prefix_commitment_equal",
    "live_incremental_suffix_equal",
    "live_replica_suffix_equal",
    "prefill_suffix_equal",
    "prefill_replica_suffix_equal",
    "comparison_objects_equal",
    *(
        f"{kind}_{pair}_fingerprint_equal"
        for kind in ("cache", "logits")
        for pair in ("live_replica", "live_prefill", "prefill_replica")
    ),
]


def _audit(row_id: str) -> dict[str, str]:
    leaves = {"cache_common_scalar_leaves_per_section": "90", "logit_common_scalar_leaves_per_section": "5"}
    return {"row_id": row_id, **dict.fromkeys(AUDIT_FLAGS, "true"), **leaves, "audit_pass": "true"}


def _stock(index: int) -> dict[str, str]:
    return {
        "row_id": f"r{index:04d}",
        "pair_replica_tokens_exact": "true",
        "pair_replica_logprobs_exact": _flag(index != 4),
        "singleton_pair_tokens_exact": _flag(index % 2 == 0),
        "singleton_pair_logprobs_exact": _flag(index == 0),
        "first_token_divergence_index": "" if index % 2 == 0 else "7",
        "first_logprob_divergence_index": "" if index == 0 else "0",
    }


def _rate(flags: list[bool], z: float = 1.96) -> dict[str, object]:
    k, n = sum(flags), len(flags)
    if n == 0:
        return {"count": 0, "n": 0, "rate": None, "wilson_95_ci": [None, None]}
    p = k / n
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return {
        "count": k,
        "n": n,
        "rate": p,
        "wilson_95_ci": [0.0 if k == 0 else max(0.0, center - half), 1.0 if k == n else min(1.0, center + half)],
    }


def _bootstrap(differences: list[int], stream: int) -> list[float]:
    generator, values = np.random.default_rng(20260728 + stream), np.array(differences, dtype=float)
    blocks = [values[generator.integers(0, len(values), (1000, len(values)))].mean(1) for _ in range(20)]
    return [float(q) for q in np.percentile(np.concatenate(blocks) * 100.0, [2.5, 97.5])]


def _mcnemar(b: int, c: int) -> float:
    """Twice the binomial tail, as the distribution at 1/2 is symmetric."""
    return 1.0 if b == c else float(2 * binom.cdf(min(b, c), b + c, 0.5))


def _true(rows: list[dict[str, str]], column: str) -> list[bool]:
    return [row[column] == "true" for row in rows]


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _matrix_claims(rows: list[dict[str, str]], left: str, stream: int) -> dict[str, object]:
    a, b = _true(rows, f"{left}_correct"), _true(rows, "prefill_correct")
    found = [int(i) for row in rows if (i := row["first_suffix_divergence_index"])]
    only = sum(x and not y for x, y in zip(a, b, strict=True)), sum(y and not x for x, y in zip(a, b, strict=True))
    numbers = ("cache_max_abs_diff", "cache_mean_abs_diff", "logit_max_abs_diff", "logit_mean_abs_diff")
    gates = (
        f"{left}_replica_exact",
        "prefill_replica_exact",
        "functional_state_equal",
        "all_storage_disjoint",
        "integrity_pass",
    )
    return {
        "rows": ROWS,
        **{f"{gate}_rows": ROWS for gate in gates},
        "cache_exact_rows": sum(_true(rows, f"{left}_prefill_cache_exact")),
        "logits_exact_rows": sum(_true(rows, f"{left}_prefill_logits_exact")),
        "immediate_argmax_different_rows": ROWS - sum(_true(rows, "boundary_argmax_equal")),
        **{
            f"{name}_disagreement": _rate([not x for x in _true(rows, f"{name}_equal")])
            for name in ("suffix", "trace", "merge", "answer")
        },
        "correctness_label_disagreement": _rate([x != y for x, y in zip(a, b, strict=True)]),
        "first_divergence": {
            "n": len(found),
            "median": _median(found),
            "min": float(min(found)),
            "max": float(max(found)),
        },
        "first_token_divergence_rows": found.count(0),
        f"{left}_correct": sum(a),
        "prefill_correct": sum(b),
        f"{left}_only_correct": only[0],
        "prefill_only_correct": only[1],
        "accuracy_delta_prefill_minus_left_pp": float(np.mean([int(y) - int(x) for x, y in zip(a, b, strict=True)]))
        * 100,
        "accuracy_paired_bootstrap_95_ci_pp": _bootstrap([int(y) - int(x) for x, y in zip(a, b, strict=True)], stream),
        "mcnemar_exact_two_sided_p": _mcnemar(*only),
        **{f"{name}_median": _median([float(row[name]) for row in rows]) for name in numbers},
    }


def _reduction(low: list[bool], high: list[bool], stream: int) -> dict[str, object]:
    differences = [int(y) - int(x) for x, y in zip(low, high, strict=True)]
    return {
        "bf16_count": sum(low),
        "fp32_count": sum(high),
        "bf16_only": differences.count(-1),
        "fp32_only": differences.count(1),
        "delta_fp32_minus_bf16_pp": float(np.mean(differences)) * 100,
        "paired_bootstrap_95_ci_pp": _bootstrap(differences, stream),
        "mcnemar_exact_two_sided_p": _mcnemar(differences.count(-1), differences.count(1)),
    }


def _cross(low: list[dict[str, str]], high: list[dict[str, str]]) -> dict[str, object]:
    def effect(rows: list[dict[str, str]]) -> np.ndarray:
        return np.array(_true(rows, "prefill_correct"), int) - np.array(_true(rows, "incremental_correct"), int)

    change = [int(x) for x in effect(high) - effect(low)]
    flags = {"suffix_mismatch": ("suffix_equal", 20), "answer_mismatch": ("answer_equal", 21)}
    flags["logits_mismatch"] = ("incremental_prefill_logits_exact", 23)
    return {
        "accuracy_effect_difference": {
            "delta_fp32_minus_bf16_pp": float(np.mean(change)) * 100,
            "paired_bootstrap_95_ci_pp": _bootstrap(change, 30),
        },
        "correctness_flip": _reduction([bool(x) for x in effect(low)], [bool(x) for x in effect(high)], 22),
        **{
            name: _reduction([not x for x in _true(low, column)], [not x for x in _true(high, column)], stream)
            for name, (column, stream) in flags.items()
        },
    }


def _transplant_claims(rows: list[dict[str, str]]) -> dict[str, object]:
    z = 1.959963984540054
    divergent = [row for row in rows if row["baseline_divergent"] == "true"]
    exact = [row for row in rows if row["baseline_divergent"] == "false"]
    directions = ("incremental_cache_into_prefill", "prefill_cache_into_incremental")
    recovered = {name: _true(divergent, f"{name}_recovers_donor") for name in directions}
    return {
        "rows": len(rows),
        "integrity_pass_rows": len(rows),
        "baseline_divergence": _rate(_true(rows, "baseline_divergent"), z),
        "baseline_exact_rows": len(exact),
        **{f"{name}_donor_recovery": _rate(flags, z) for name, flags in recovered.items()},
        "bidirectional_donor_recovery": _rate([all(pair) for pair in zip(*recovered.values(), strict=True)], z),
        "exact_control_novel_trajectory": _rate(_true(exact, "exact_control_novel_trajectory"), z),
    }


def _claims(files: dict[str, list[dict[str, str]]]) -> dict[str, object]:
    claims: dict[str, object] = {"schema": "stage-replay-paper-claims-v1"}
    for name, file, left, offset in (
        ("matched_live_prefill", "matched_live_prefill.csv", "live", 0),
        ("fixed_prefix_2x2", "fixed_prefix_2x2.csv", "incremental", 100),
    ):
        low, high = ([row for row in files[file] if row["precision"] == precision] for precision in ("bf16", "fp32"))
        block: dict[str, object] = {
            "bf16": _matrix_claims(low, left, offset),
            "fp32": _matrix_claims(high, left, offset + 1),
        }
        block["cross_precision_prefix_exact_rows"] = sum(
            a["prefix_sha256"] == b["prefix_sha256"] for a, b in zip(low, high, strict=True)
        )
        if left == "incremental":
            block["cross_precision"] = _cross(low, high)
            for precision, rows in (("bf16", low), ("fp32", high)):
                block[precision]["cache_relative_l2_diff_median"] = _median(
                    [float(r["cache_relative_l2_diff"]) for r in rows]
                )  # type: ignore[index]
        claims[name] = block
    bridge = files["live_teacher_bridge.csv"]
    columns = (
        "live_teacher_cache_exact",
        "live_teacher_logits_exact",
        "live_teacher_suffix_exact",
        "all_48_layers_exact",
        "integrity_pass",
    )
    ranges = {
        f"{age}_prefix_length_range": [f(int(row[f"{age}_prefix_token_count"]) for row in bridge) for f in (min, max)]
        for age in ("new", "historical")
    }
    claims["prospective_bridge"] = {
        "rows": 3,
        "live_matches_historical_prefix_rows": 1,
        **{f"{c}_rows": 3 for c in columns},
        **ranges,
    }
    claims["historical_bridge"] = {
        "rows": ROWS,
        "audit_pass_rows": ROWS,
        **{f"{flag}_rows": ROWS for flag in AUDIT_FLAGS},
        "cache_common_scalar_leaves_per_section": 90,
        "logit_common_scalar_leaves_per_section": 5,
    }
    claims["transplant_primary"] = _transplant_claims(files["kv_transplant_primary.csv"])
    claims["transplant_later"] = _transplant_claims(files["kv_transplant_later.csv"])
    claims["stock_qwen_diagnostic"] = {
        "rows": 5,
        "pair_replica_token_exact_rows": 5,
        "pair_replica_logprob_exact_rows": 4,
        "singleton_pair_token_exact_rows": 3,
        "singleton_pair_logprob_exact_rows": 1,
    }
    return claims
