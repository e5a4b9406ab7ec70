"""Every published claim beside its recomputation from the released rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stats.errors import StatsInputError
from stats.intervals import SEED, STREAMS, Z_MATRIX, Z_TRANSPLANT
from stats.published.ledgers import audit_claims, bridge_claims, stock_claims, transplant_claims
from stats.published.matrices import (
    PRECISIONS,
    by_precision,
    cross_precision_claims,
    matrix_claims,
    prefix_equal_rows,
    relative_l2_median,
)
from stats.published.tables import read_json, read_rows

SCHEMA = "stage-replay-paper-claims-v1"
MISSING = "(missing)"
_PLAN = {
    "bootstrap_seed": SEED,
    "bootstrap_streams": STREAMS,
    "matrix_wilson_z": Z_MATRIX,
    "transplant_wilson_z": Z_TRANSPLANT,
}


@dataclass(frozen=True)
class Claim:
    """One leaf of the claims: its path, both values, and whether they are the same value of the same type, floats to
    the last bit.
    """

    name: str
    published: object
    recomputed: object

    @property
    def equal(self) -> bool:
        return type(self.published) is type(self.recomputed) and repr(self.published) == repr(self.recomputed)


def recompute(directory: Path | str) -> list[Claim]:
    """Every leaf of `directory`/paper_claims.json beside its value recomputed from `directory`/data, in name order.

    A leaf that only one side has stands against "(missing)". Raises StatsInputError for a file that is missing,
    malformed or contradicts itself, for another claims schema, and for an analysis_plan.json whose seed, streams or
    quantiles are not those of `stats.intervals`.
    """
    directory = Path(directory)
    path = directory / "paper_claims.json"
    published = read_json(path)
    schema = published.pop("schema", None)
    if schema != SCHEMA:
        raise StatsInputError(f"{path}: expected schema {SCHEMA!r}, found {str(schema)[:80]!r}")
    _check_plan(directory / "analysis_plan.json")
    left, right = dict(_leaves(published)), dict(_leaves(recomputed_claims(directory / "data")))
    return [
        Claim(name, left.get(name, MISSING), right.get(name, MISSING)) for name in sorted(left.keys() | right.keys())
    ]


def recomputed_claims(data: Path) -> dict[str, object]:
    """The claims of the seven CSV files in `data`, nested as in paper_claims.json."""
    matched = by_precision(read_rows(data / "matched_live_prefill.csv", ("precision", "row_id")))
    fixed = by_precision(read_rows(data / "fixed_prefix_2x2.csv", ("precision", "row_id")))
    return {
        "matched_live_prefill": {
            **{name: matrix_claims(matched[name], "live", f"matched_{name}") for name in PRECISIONS},
            "cross_precision_prefix_exact_rows": prefix_equal_rows(matched),
        },
        "fixed_prefix_2x2": {
            **{
                name: {
                    **matrix_claims(fixed[name], "incremental", f"fixed_{name}"),
                    "cache_relative_l2_diff_median": relative_l2_median(fixed[name]),
                }
                for name in PRECISIONS
            },
            "cross_precision": cross_precision_claims(fixed, "incremental"),
            "cross_precision_prefix_exact_rows": prefix_equal_rows(fixed),
        },
        "prospective_bridge": bridge_claims(read_rows(data / "live_teacher_bridge.csv")),
        "historical_bridge": audit_claims(read_rows(data / "historical_bridge_audit.csv")),
        "transplant_primary": transplant_claims(read_rows(data / "kv_transplant_primary.csv")),
        "transplant_later": transplant_claims(read_rows(data / "kv_transplant_later.csv")),
        "stock_qwen_diagnostic": stock_claims(read_rows(data / "stock_qwen_control.csv")),
    }


def _check_plan(path: Path) -> None:
    uncertainty = read_json(path).get("uncertainty")
    for name, ours in _PLAN.items():
        theirs = uncertainty.get(name, MISSING) if isinstance(uncertainty, dict) else MISSING
        if theirs != ours:
            raise StatsInputError(f"{path}: expected uncertainty.{name} {ours}, found {theirs}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf under its dotted path; list entries as [0], [1]. An empty container is a leaf, so that none
    vanishes.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
