"""Two runs joined by row identity: which arms stand for which, and every leaf that both schemas share, compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.leaves import compare_leaves, leaves, without
from experiments.harness.ledger import row_key
from experiments.harness.reader import Run, read_finished
from experiments.harness.records import Row, RowExtra

COUNTERPART = {"live": "incremental", "live_replica": "incremental_replica"}
COUNTERPART |= {theirs: mine for mine, theirs in COUNTERPART.items()}
DIGESTS = ("cache_sha256", "logits_sha256")
SECTIONS = ("prefix", "arms", "comparisons")  # of a row; everything else but its place in its own run is "other"
PLACE = ("row", "index", "dtype", "cell", "row_sha256")
SHOWN = 12


@dataclass(frozen=True)
class Ledger:
    """A finished run whose rows can be joined with another's."""

    run: Run
    rows: dict[str, dict[str, Any]]  # by CELL/ID, or DTYPE/ID also where the run has one precision only
    dtype_of: dict[str, str]  # key: dtype

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(self.dtype_of.values()))


def read_ledger_to_join(path: Path) -> Ledger:
    """InputError where the run is missing, unfinished, damaged or contradicts itself."""
    run, _ = read_finished(path)
    rows, dtypes = {}, {}
    for own, row in run.rows.items():
        dtype = str(run.numeric_of(own)["dtype"])
        key = own if "cell" in row else row_key({**row, "dtype": dtype})
        rows[key], dtypes[key] = row, dtype
    return Ledger(run, rows, dtypes)


def joined_arms(left: dict[str, Any], right: dict[str, Any]) -> dict[str, str]:
    """Returns {arm of the left row: arm of the right row}: the same name; otherwise live is joined with incremental
    where each side has only one of the two."""
    pairs = {}
    for name in left:
        other = COUNTERPART.get(name)
        if name in right:
            pairs[name] = name
        elif other in right and other not in left:
            pairs[name] = str(other)
    return pairs


def sections(left: dict[str, Any], right: dict[str, Any], arms: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """Returns {SECTION: (left object, right object)}: the prefix, each arm, of each comparison its cache, its logits
    and the rest, and everything else in the row as "other". A section is named by the left row's arms."""
    found: dict[str, tuple[Any, Any]] = {}
    if "prefix" in left or "prefix" in right:
        found["prefix"] = (left.get("prefix"), right.get("prefix"))
    for mine, theirs in arms.items():
        found[f"arm {mine}"] = (left["arms"][mine], right["arms"][theirs])
    for name, pair in left["comparisons"].items():
        a, b = name.split(":")
        other = right["comparisons"].get(f"{arms.get(a)}:{arms.get(b)}")
        if other is None:
            continue
        for part in ("cache", "logits"):
            if part in pair and part in other:
                found[f"{part} {name}"] = (pair[part], other[part])
        found[f"comparison {name}"] = (without(pair, "cache", "logits"), without(other, "cache", "logits"))
    found["other"] = (without(left, *SECTIONS, *PLACE), without(right, *SECTIONS, *PLACE))
    return found


def _scalars(left: Any, right: Any) -> int:
    """Returns how many scalar leaves both sides have in any row: `first_difference` is one leaf or three."""
    mine, theirs = leaves(left), leaves(right)
    names = [path for path, value in mine.items() if path in theirs and not isinstance(value, list | dict)]
    return sum("first_difference" not in path for path in names)


def audit_row(key: str, dtype: str, index: int, left: dict[str, Any], right: dict[str, Any]) -> Row:
    """Returns one row of the audit: its gates, the leaf counts per section, and the first leaves that differ.

    Gates: `arms` (arms were joined, or neither row is made of arms), `prefix`, `suffix LEFT:RIGHT` (the whole token
    array), `DIGEST LEFT:RIGHT` (injective, of the tensors themselves), and `leaves SECTION`.
    """
    arms = joined_arms(left["arms"], right["arms"])
    armless = not left["arms"] and not right["arms"] and "failure" not in left and "failure" not in right
    gates, counts = {"arms": bool(arms) or armless}, {}
    differing: list[str] = []
    for section, (mine, theirs) in sections(left, right, arms).items():
        found = compare_leaves(mine, theirs)
        counts[section] = {
            "shared": found.shared,
            "scalars": _scalars(mine, theirs),
            "unshared": len(found.one_sided),
        }
        gates["prefix" if section == "prefix" else f"leaves {section}"] = found.shared > 0 and not found.differing
        differing += [f"{section} {one.path}" for one in found.differing]
    for mine, theirs in arms.items():
        a, b = left["arms"][mine], right["arms"][theirs]
        for field in ("suffix", *DIGESTS):
            if field in a and field in b:
                gates[f"{field} {mine}:{theirs}"] = a[field] == b[field]
    identity: RowExtra = {"cell": left["cell"]} if "cell" in left else {"dtype": dtype}
    return {
        "row": left["row"],
        **identity,
        "index": index,
        "left_row_sha256": left["row_sha256"],
        "right_row_sha256": right["row_sha256"],
        "joined": arms,
        "leaves": counts,
        "differing": differing[:SHOWN],
        "differing_leaves": len(differing),
        "arms": {},
        "comparisons": {},
        "gates": gates,
        "passed": all(gates.values()),
    }
