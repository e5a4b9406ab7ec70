"""From the crossed cells to statements: counts, the necessary-and-sufficient rule, distances, margins."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from experiments.run.inputs import panel_counts
from experiments.run.records import Endpoints, Panel, Row, Summary
from experiments.run.summary import pair_summary, run_summary
from stats.intervals import STREAMS
from stats.margins import ulp

PAIR = "incremental:prefill"
ULPS = (0, 1, 2, 4)
FACTORS = ["repeat_kv/plain", "repeat_kv/tiled", "blocked/plain", "blocked/tiled"]  # the cells that the rule reads


def causes_summary(rows: Sequence[Row], names: Sequence[str], panel: Panel, alone: dict[str, Any]) -> Summary:
    """Returns the head and the endpoints by cell and by dtype. names: the cells. alone: as given, of `rows_alone`.

    A dtype that lacks one of the four cells which the rule reads has no verdict.
    """
    by_cell = {name: [row for row in rows if row["cell"] == name] for name in names}
    dtypes = list(dict.fromkeys(name.split("/")[0] for name in names))
    decided = [dtype for dtype in dtypes if {f"{dtype}/{cell}" for cell in FACTORS} <= set(names)]
    chunks = {name: [row["chunks"] for row in found if "chunks" in row] for name, found in by_cell.items()}
    endpoints: Endpoints = {
        "panel": panel_counts(panel),
        "left_out": panel["left_out"],
        "cells": {name: _cell(found, name) for name, found in by_cell.items()},
        "verdicts": {dtype: verdict(dtype, by_cell) for dtype in decided},
        "chunks": {name: _chunks(found) for name, found in chunks.items() if found},
        "oracle": {name: _oracle(found) for name, found in by_cell.items()},
        "alone": alone,
        "margins": {name: margins(found, name.split("/")[0]) for name, found in by_cell.items()},
    }
    return run_summary("causes", ", ".join(dtypes), rows, endpoints)


def _cell(rows: Sequence[Row], name: str) -> dict[str, Any]:
    stream = STREAMS["fixed_bf16" if name.startswith("bf16") else "fixed_fp32"]
    summary = pair_summary(rows, "incremental", "prefill", stream)
    firsts = [row["comparisons"][PAIR]["cache"]["first_difference"] for row in rows if row["comparisons"]]
    places = [f"layer {first['layer']} {first['tensor']}" for first in firsts if first is not None]
    common = max(sorted(set(places)), key=places.count) if places else None
    return {**summary, "first_difference": {"most_common": common, "rows": places.count(common) if common else 0}}


def verdict(dtype: str, by_cell: dict[str, list[Row]]) -> dict[str, Any]:
    """Returns which default kernel is necessary and which sufficient, per endpoint.

    With D(attention, linear) the rows that differ under that cell, a factor's default kernel is *sufficient* where it
    alone gives a difference (the other factor invariant, D > 0), and *necessary* where making it alone invariant leaves
    none (the other factor at its default, D = 0, while D of both defaults > 0). Evidence: the rows that differ in the
    deciding cell.
    """
    found: dict[str, Any] = {}
    endpoints: tuple[Literal["cache", "suffix"], ...] = ("cache", "suffix")
    for endpoint in endpoints:
        both, attention, linear, neither = (
            [row["row"] for row in by_cell[f"{dtype}/{cell}"] if _differs(row, endpoint)] for cell in FACTORS
        )
        found[endpoint] = {"default_differs": len(both), "invariant_differs": len(neither)}
        for factor, alone, without in (("attention", attention, linear), ("linear", linear, attention)):
            found[endpoint][factor] = {
                "sufficient": bool(alone),
                "necessary": bool(both) and not without,
                "differs_alone": alone,
                "differs_without": without,
            }
    return found


def _differs(row: Row, endpoint: Literal["cache", "suffix"]) -> bool:
    return bool(row["comparisons"]) and not row["comparisons"][PAIR][endpoint]["exact"]


def _chunks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    result = {}
    sizes = dict.fromkeys(size for curve in rows for size in curve)
    for size in sorted(sizes, key=lambda c: math.inf if c == "one_call" else int(c)):
        found = [curve[size] for curve in rows if size in curve]
        result[size] = {
            "rows": len(found),
            "exact_rows": sum(entry["exact"] for entry in found),
            "share_median": statistics.median(entry["share"] for entry in found),
            "relative_l2_median": statistics.median(entry["relative_l2"] for entry in found),
        }
    return result


def _oracle(rows: Sequence[Row]) -> dict[str, Any]:
    kept = [row["oracle"] for row in rows if "oracle" in row]
    if not kept:
        return {"rows": 0}
    arms = {arm: [entry["arms"][arm] for entry in kept] for arm in kept[0]["arms"]}
    median = {
        arm: {key: statistics.median(one[key] for one in found) for key in ("cache_relative_l2", "logits_relative_l2")}
        for arm, found in arms.items()
    }
    nearer = [entry["nearer"] or "equal" for entry in kept]
    return {
        "rows": len(kept),
        "median": median,
        "nearer": {name: nearer.count(name) for name in ("incremental", "prefill", "equal")},
        "argmax_equal": {arm: sum(one["argmax_equal"] for one in found) for arm, found in arms.items()},
    }


def margins(rows: Sequence[Row], dtype: str) -> dict[str, Any]:
    """Relates first divergences to small margins, over the rows that diverge.

    within_ulps {k: share}: first divergences whose margin (incremental's) is at most k units in the last place of the
    best logit. spearman: rank correlation, over diverging rows, between the first divergence and the first step whose
    margin is at most one such unit (spearman_rows of them); None with fewer than three rows or no variation.
    tied_steps: the share of all free suffix steps that are exact ties, the base rate.
    """
    ulps, firsts, smalls, free = [], [], [], []
    for row in [row for row in rows if row["comparisons"]]:
        steps, suffix = row["arms"]["incremental"]["margins"], row["comparisons"][PAIR]["suffix"]
        free += [margin for margin in steps if margin is not None]
        first, top = suffix["first_divergence"], suffix["tops"][0]
        margin = steps[first] if first is not None and first < len(steps) else None
        if first is None or top is None or margin is None:
            continue
        one = ulp(top, dtype)
        ulps.append(margin / one)
        small = next((i for i, margin in enumerate(steps) if margin is not None and margin <= one), None)
        if small is not None:
            firsts.append(first)
            smalls.append(small)
    spearman = None
    if len(set(firsts)) > 1 and len(set(smalls)) > 1 and len(firsts) > 2:
        from scipy.stats import spearmanr  # here, as `stats.intervals` says

        spearman = float(spearmanr(firsts, smalls).statistic)
    return {
        "diverging_rows": len(ulps),
        "within_ulps": {str(k): sum(u <= k for u in ulps) / len(ulps) if ulps else None for k in ULPS},
        "spearman": spearman,
        "spearman_rows": len(firsts),
        "tied_steps": sum(margin == 0 for margin in free) / len(free) if free else None,
    }
