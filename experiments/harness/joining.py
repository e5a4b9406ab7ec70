"""Joining two ledgers by row: which arms stand for which, and every leaf that both schemas share, compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.canonical import canonical, sha256_file
from experiments.harness.rundir import ROWS, open_finished
from minimodel.errors import InputError

COUNTERPART = {"live": "incremental", "live_replica": "incremental_replica"}
COUNTERPART |= {theirs: mine for mine, theirs in COUNTERPART.items()}
DIGESTS = ("cache_sha256", "logits_sha256")
SHOWN = 12


@dataclass(frozen=True)
class Ledger:
    """A finished run's rows by (dtype, row id), in its own order."""

    path: Path
    manifest: dict[str, Any]
    rows: dict[tuple[str, str], dict[str, Any]]
    sha256: str

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(dtype for dtype, _ in self.rows))


def read_run(path: Path) -> Ledger:
    """InputError when the run is missing, unfinished or damaged, or holds no arms to join by."""
    manifest, rows, _ = open_finished(path)
    if not any(row.get("arms") for row in rows):
        raise InputError(f"{path / ROWS}: expected rows with arms, found none")
    only = manifest["numeric"][0]["dtype"]
    return Ledger(path, manifest, {(row.get("dtype", only), row["row"]): row for row in rows}, sha256_file(path / ROWS))


def joined_arms(left: dict[str, Any], right: dict[str, Any]) -> dict[str, str]:
    """{arm of the left row: arm of the right row}: the same name, or live for incremental where one side has only the
    one and the other side only the other."""
    pairs = {}
    for name in left:
        other = COUNTERPART.get(name)
        if name in right:
            pairs[name] = name
        elif other in right and other not in left:
            pairs[name] = str(other)
    return pairs


def leaves(value: Any, at: str = "") -> dict[str, str]:
    """{path: canonical JSON} of every leaf; a list of scalars (tokens, margins) is one leaf. Equal text: equal value of
    equal type, floats to the last bit."""
    if isinstance(value, dict):
        children = [(f"{at}.{key}" if at else str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, (dict, list)) for child in value):
        children = [(f"{at}[{index}]", child) for index, child in enumerate(value)]
    else:
        return {at: canonical(value)}
    return {path: leaf for where, child in children for path, leaf in leaves(child, where).items()}


@dataclass(frozen=True)
class Shared:
    """Leaves of one section: how many both schemas have, how many only one has, and the shared ones that differ."""

    shared: int
    unshared: int
    differing: tuple[str, ...]


def compare_leaves(left: Any, right: Any, name: str) -> Shared:
    mine, theirs = leaves(left), leaves(right)
    both = [path for path in mine if path in theirs]
    differing = tuple(f"{name} {path}" for path in both if mine[path] != theirs[path])
    return Shared(len(both), len(mine) + len(theirs) - 2 * len(both), differing)


def sections(left: dict[str, Any], right: dict[str, Any], arms: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """{SECTION: (left object, right object)}: the prefix, each arm, and of each comparison its cache, its logits and
    the rest. A section is named by the left row's arms."""
    found: dict[str, tuple[Any, Any]] = {"prefix": (left.get("prefix", {}), right.get("prefix", {}))}
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
        rest = [{k: v for k, v in one.items() if k not in ("cache", "logits")} for one in (pair, other)]
        found[f"comparison {name}"] = (rest[0], rest[1])
    return found


def audit_row(key: tuple[str, str], index: int, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """One row of the audit: a gate a check, the leaf counts a section, and the first leaves that differ.

    Gates: `arms` (both rows hold arms to compare), `prefix`, `suffix LEFT:RIGHT` (the whole token array),
    `DIGEST LEFT:RIGHT` (injective, of the tensors themselves), and `leaves SECTION`.
    """
    arms = joined_arms(left["arms"], right["arms"])
    gates, counts = {"arms": bool(arms)}, {}
    differing: list[str] = []
    for section, (mine, theirs) in sections(left, right, arms).items():
        found = compare_leaves(mine, theirs, section)
        counts[section] = {"shared": found.shared, "unshared": found.unshared}
        gates["prefix" if section == "prefix" else f"leaves {section}"] = found.shared > 0 and not found.differing
        differing += found.differing
    for mine, theirs in arms.items():
        a, b = left["arms"][mine], right["arms"][theirs]
        for field, name in (("suffix", "suffix"), *((digest, digest) for digest in DIGESTS)):
            if field in a and field in b:
                gates[f"{name} {mine}:{theirs}"] = a[field] == b[field]
    return {
        "row": key[1],
        "dtype": key[0],
        "index": index,
        "joined": arms,
        "leaves": counts,
        "differing": differing[:SHOWN],
        "differing_leaves": len(differing),
        "arms": {},
        "comparisons": {},
        "gates": gates,
        "passed": all(gates.values()),
    }
