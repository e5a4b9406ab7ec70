"""Two run directories of one schema: every field of every row that both hold."""

from dataclasses import dataclass
from typing import Any

from experiments.crosscheck.files import environment_differences
from experiments.run.leaves import compare_leaves, without
from experiments.run.reader import Run
from minimodel.errors import InputError, refuse

SAME = ("experiment", "checkpoint", "caps", "visibility", "role_offset")  # of the manifest: otherwise not comparable
NOTED = ("tasks_sha256", "code_sha256", "numeric", "environment", "schema")
SEAL = "row_sha256"


@dataclass(frozen=True)
class RowPair:
    """One row on both sides."""

    row: str  # its identity
    equal_fields: int  # leaves with the same value
    differing: list[str]  # one line per leaf with two values
    one_sided: list[str]  # one line per leaf that one side lacks

    @property
    def equal(self) -> bool:
        return not self.differing and not self.one_sided


def require_comparable(left: Run, right: Run) -> None:
    """InputError for runs of another checkpoint, contract, dtype or token list."""
    for key in SAME:
        if left.manifest.get(key) != right.manifest.get(key):
            lines = compare_leaves(left.manifest.get(key), right.manifest.get(key), key).lines("expected", "found")
            raise InputError(f"{right.path}: expected the {key} of {left.path}, found {'; '.join(lines[:2])}")
    mine, theirs = ([one.get("dtype") for one in run.numeric()] for run in (left, right))
    if mine != theirs:
        raise refuse(f"{right.path}: dtype", repr(mine), theirs)
    if not common_rows(left, right):
        raise InputError(f"{right.path}: expected at least one row of {left.path}, found none")
    for row in common_rows(left, right):
        prompts = [prompt_tokens(run.rows[row]) for run in (left, right)]
        if None not in prompts and prompts[0] != prompts[1]:
            raise InputError(f"{right.path}: row {row!r}: expected the prompt tokens of {left.path}, found others")


def common_rows(left: Run, right: Run) -> list[str]:
    """Returns the identities of the rows that both runs hold, in the left run's order."""
    return [row for row in left.rows if row in right.rows]


def prompt_tokens(row: dict[str, Any]) -> list[int] | None:
    """Returns the tokens that were given and not chosen, that is all without a margin; None in a row without them."""
    if "tokens" not in row.get("prefix", {}):
        return None
    tokens = row["prefix"]["tokens"]
    return tokens[: len(tokens) - len(row.get("prefix_margins", []))]


def run_environment(left: Run, right: Run) -> list[str]:
    """Returns one line per difference of the manifests, results apart."""
    sides = []
    for run in (left, right):
        source = run.manifest.get("source", "stage-replay")
        kept = {key: run.manifest.get(key) for key in NOTED}
        kept["numeric"] = {str(index): one for index, one in enumerate(run.numeric())}
        sides.append({"source": source, "numeric": kept.pop("numeric"), "environment": kept})
    return environment_differences(*sides)


def compare_rows(name: str, left: dict[str, Any], right: dict[str, Any]) -> RowPair:
    """Compares leaf by leaf, floats by their exact value; the seal of a row follows from the rest and is left out."""
    found = compare_leaves(without(left, SEAL), without(right, SEAL))
    return RowPair(
        name,
        found.shared - len(found.differing),
        [one.line("A", "B") for one in found.differing],
        [one.line("A", "B") for one in found.one_sided],
    )
