"""A small release in the published format, with claims computed by other means than in `stats`."""

import csv
import hashlib
import json
import random
from pathlib import Path

from tests.stats.synthetic_claims import AUDIT_FLAGS, ROWS, Table, release_claims

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
    (directory / "paper_claims.json").write_text(json.dumps(release_claims(files)))
    return directory


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _matrix(left: str, seed: int) -> Table:
    draw = random.Random(seed)
    return [_matrix_row(left, precision, i, draw) for precision in ("bf16", "fp32") for i in range(ROWS)]


def _matrix_row(left: str, precision: str, i: int, draw: random.Random) -> dict[str, str]:
    equal = draw.random() < (0.3 if precision == "bf16" else 0.9)
    answer_equal = equal or draw.random() < 0.5
    correct = draw.random() < 0.5
    own, other = _digest(left, precision, i), _digest("prefill", precision, i)
    gates = [f"{arm}_replica_{part}_exact" for arm in (left, "prefill") for part in ("cache", "logits", "suffix")]
    return {
        "row_id": f"r{i:04d}",
        "precision": precision,
        "prefix_token_count": str(100 + 7 * i % 97 * 50 + i),
        "prefix_sha256": _digest("prefix", i, precision if left == "live" and i % 4 else ""),
        **dict.fromkeys([*gates, "functional_state_equal", "all_storage_disjoint"], "true"),
        f"{left}_prefill_cache_exact": _flag(draw.random() < 0.1),
        f"{left}_prefill_logits_exact": _flag(draw.random() < 0.2),
        **_drift(draw),
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
        f"{left}_correct": _flag(correct),
        "prefill_correct": _flag(correct if answer_equal else draw.random() < 0.5),
        "integrity_pass": "true",
    }


def _drift(draw: random.Random) -> dict[str, str]:
    left, right, delta = 30.0 + draw.random(), 30.0 + draw.random(), draw.random()
    sizes = ("cache_max_abs", "cache_mean_abs", "logit_max_abs", "logit_mean_abs")
    return {
        **{f"{name}_diff": repr(draw.random()) for name in sizes},
        "cache_left_l2_norm": repr(left),
        "cache_right_l2_norm": repr(right),
        "cache_delta_l2_norm": repr(delta),
        "cache_relative_l2_diff": repr(delta / max(left, right)),
    }


def _transplant(index: int, item: tuple[int, str], divergent: bool, fault: int) -> dict[str, str]:
    """`fault` 3: the incremental recipient keeps its own trajectory; `fault` 1 on an exact row: a third trajectory."""
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
