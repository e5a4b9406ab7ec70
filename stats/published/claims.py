"""Every published claim beside its recomputation from the released rows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stats.errors import StatsInputError
from stats.intervals import UNCERTAINTY
from stats.published import ledgers
from stats.published.tables import read_precisions, read_table

SCHEMA = "stage-replay-paper-claims-v1"
MISSING = "(missing)"


class Claim(NamedTuple):
    """One leaf of the claims."""

    name: str  # its path
    published: object
    recomputed: object

    @property
    def equal(self) -> bool:
        """Whether both are the same value of the same type, floats to the last bit."""
        return type(self.published) is type(self.recomputed) and repr(self.published) == repr(self.recomputed)


def recompute(published: Mapping[str, Any], plan: Mapping[str, Any], data: Path) -> list[Claim]:
    """Returns every leaf of the published claims beside its value recomputed from the CSV files in `data`, by name.

    published, plan: the objects of paper_claims.json and analysis_plan.json. A leaf that only one side has stands
    against "(missing)". Raises StatsInputError for another claims schema, for a plan whose seed, streams or quantiles
    are not those of `stats.intervals`, and for a CSV file that is missing, malformed or contradicts itself.
    """
    if published.get("schema") != SCHEMA:
        found = str(published.get("schema"))[:80]
        raise StatsInputError(f"paper_claims.json: expected schema {SCHEMA!r}, found {found!r}")
    uncertainty = plan.get("uncertainty")
    for name, ours in UNCERTAINTY.items():
        theirs = uncertainty.get(name, MISSING) if isinstance(uncertainty, dict) else MISSING
        if theirs != ours and not isinstance(ours, str):  # a string is a description
            raise StatsInputError(f"analysis_plan.json: expected uncertainty.{name} {ours}, found {theirs}")
    left = dict(_leaves({name: value for name, value in published.items() if name != "schema"}))
    right = dict(_leaves(recomputed(data)))
    return [Claim(name, left.get(name, MISSING), right.get(name, MISSING)) for name in sorted({**left, **right})]


def recomputed(data: Path) -> dict[str, object]:
    """Returns the claims of the seven CSV files in `data`, nested as in paper_claims.json."""
    matched, fixed = (read_precisions(data / f"{name}.csv") for name in ("matched_live_prefill", "fixed_prefix_2x2"))
    crossed = {"cross_precision": ledgers.cross_precision_claims(fixed)}
    return {
        "matched_live_prefill": ledgers.matrix_claims(matched, "live", "matched"),
        "fixed_prefix_2x2": {**ledgers.matrix_claims(fixed, "incremental", "fixed"), **crossed},
        "prospective_bridge": ledgers.bridge_claims(read_table(data / "live_teacher_bridge.csv")),
        "historical_bridge": ledgers.audit_claims(read_table(data / "historical_bridge_audit.csv")),
        "transplant_primary": ledgers.transplant_claims(read_table(data / "kv_transplant_primary.csv")),
        "transplant_later": ledgers.transplant_claims(read_table(data / "kv_transplant_later.csv")),
        "stock_qwen_diagnostic": ledgers.stock_claims(read_table(data / "stock_qwen_control.csv")),
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields every leaf under its dotted path, list entries as [0], [1]. An empty container is a leaf too."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
