"""Every published claim beside its recomputation from the released rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stats.errors import StatsInputError
from stats.intervals import UNCERTAINTY
from stats.published.ledgers import audit_claims, bridge_claims, stock_claims, transplant_claims
from stats.published.matrices import (
    PRECISIONS,
    by_precision,
    cross_precision_claims,
    matrix_claims,
    prefix_equal_rows,
    relative_l2_median,
)
from stats.published.tables import read_rows

SCHEMA = "stage-replay-paper-claims-v1"
MISSING = "(missing)"


@dataclass(frozen=True)
class Claim:
    """One leaf of the claims."""

    name: str  # its path
    published: object
    recomputed: object

    @property
    def equal(self) -> bool:
        """Whether both are the same value of the same type, floats to the last bit."""
        return type(self.published) is type(self.recomputed) and repr(self.published) == repr(self.recomputed)


def recompute(published: Mapping[str, Any], plan: Mapping[str, Any], data: Path) -> list[Claim]:
    """Return every leaf of the published claims beside its value recomputed from the CSV files in `data`, by name.

    published, plan: the objects of paper_claims.json and analysis_plan.json. A leaf that only one side has stands
    against "(missing)". Raises StatsInputError for another claims schema, for a plan whose seed, streams or quantiles
    are not those of `stats.intervals`, and for a CSV file that is missing, malformed or contradicts itself.
    """
    if published.get("schema") != SCHEMA:
        found = str(published.get("schema"))[:80]
        raise StatsInputError(f"paper_claims.json: expected schema {SCHEMA!r}, found {found!r}")
    _check_plan(plan.get("uncertainty"))
    claims = {name: value for name, value in published.items() if name != "schema"}
    left, right = dict(_leaves(claims)), dict(_leaves(recomputed_claims(data)))
    return [
        Claim(name, left.get(name, MISSING), right.get(name, MISSING)) for name in sorted(left.keys() | right.keys())
    ]


def recomputed_claims(data: Path) -> dict[str, object]:
    """Return the claims of the seven CSV files in `data`, nested as in paper_claims.json."""
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


def _check_plan(uncertainty: Any) -> None:
    for name, ours in UNCERTAINTY.items():
        if isinstance(ours, str):  # a description, not a number
            continue
        theirs = uncertainty.get(name, MISSING) if isinstance(uncertainty, dict) else MISSING
        if theirs != ours:
            raise StatsInputError(f"analysis_plan.json: expected uncertainty.{name} {ours}, found {theirs}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf under its dotted path, list entries as [0], [1]. An empty container is a leaf too."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
