"""The bank: every BF16 boundary prefix of a finished matrix run, in source order, without filtering (paper, section
3.4).

It is read from the matrix run itself, or from the copy `bank.jsonl` that a fixed_prefix run keeps beside its ledger.
The digest is that of the copy's bytes, so that a bank has one digest whichever of the two it is read from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from decode.contract import Contract
from decode.state import State, token_digest
from experiments.run.directory import ROWS
from experiments.run.leaves import compare_leaves
from experiments.run.ledger import canonical, require_distinct, row_key, sha256_file, sha256_text
from experiments.run.manifest import contract_entries
from experiments.run.reader import read_finished
from experiments.run.records import Manifest, PanelRow, Row
from minimodel.checkpoint import file_digests
from minimodel.errors import InputError, refuse
from minimodel.files import parse_json, read_bytes

BANK = "bank.jsonl"
BANK_DTYPE = "bf16"
MATRIX_COMMAND = f"python -m experiments.matrix --dtype {BANK_DTYPE}"
FIXED_COMMAND = "python -m experiments.fixed_prefix"
MAX_BANK_BYTES = 1 << 30


@dataclass(frozen=True)
class Prefix:
    """One row's boundary prefix."""

    row: str  # its id
    tokens: tuple[int, ...]  # through merge's opening delimiter
    sha256: str  # their digest

    def __len__(self) -> int:
        return len(self.tokens)

    def name(self) -> PanelRow:
        """Returns what a manifest's panel keeps of it."""
        return {"row": self.row, "length": len(self), "sha256": self.sha256}


@dataclass(frozen=True)
class Bank:
    """The prefixes of a run."""

    prefixes: tuple[Prefix, ...]  # in source order
    source: Path  # the run's directory
    manifest: Manifest  # the run's
    ledger_sha256: str  # of the matrix ledger

    def text(self) -> str:
        """Returns bank.jsonl: one canonical line per prefix."""
        return "".join(canonical({**p.name(), "tokens": list(p.tokens)}) + "\n" for p in self.prefixes)

    def record(self) -> dict[str, Any]:
        """Returns the manifest's `panel.bank`."""
        return {"sha256": sha256_text(self.text()), "rows": len(self.prefixes), "ledger_sha256": self.ledger_sha256}

    def first(self, limit: int | None) -> "Bank":
        """Returns the bank of the first `limit` prefixes."""
        return replace(self, prefixes=self.prefixes[:limit])


def open_source(path: Path, experiments: tuple[str, ...], command: str) -> tuple[Manifest, list[Row]]:
    """Returns manifest and rows of a finished run that passed its gates. InputError ends with the command that
    makes one."""
    try:
        run, summary = read_finished(path)
    except InputError as error:
        raise InputError(f"{error}; make it with: {command}") from None
    if run.experiment not in experiments:
        raise refuse(f"{path}: experiment", " or ".join(experiments), run.experiment)
    if not summary.get("passed"):
        raise InputError(f"{path}: expected a run whose gates all passed, found failed rows; make it with: {command}")
    return cast(Manifest, run.manifest), [cast(Row, row) for row in run.rows.values()]


def open_bank(path: Path) -> Bank:
    """Returns the bank of a finished matrix or fixed_prefix run. InputError where the run is missing, unfinished or
    altered."""
    manifest, rows = open_source(path, ("matrix", "fixed_prefix"), MATRIX_COMMAND)
    return matrix_bank(path, manifest, rows) if manifest["experiment"] == "matrix" else copied_bank(path, manifest)


def matrix_bank(path: Path, manifest: Manifest, rows: list[Row]) -> Bank:
    """Returns the bank of a matrix ledger. InputError for another dtype, and for a prefix that is not what its
    digest says."""
    dtype = manifest["numeric"][0]["dtype"]
    if dtype != BANK_DTYPE:
        raise InputError(f"{path}: expected a {BANK_DTYPE} run, found {dtype}; make it with: {MATRIX_COMMAND}")
    prefixes = [_prefix(row["row"], row["prefix"], f"{path / ROWS} row {row_key(row)}") for row in rows]
    return Bank(tuple(prefixes), path, manifest, sha256_file(path / ROWS))


def copied_bank(path: Path, manifest: Manifest) -> Bank:
    """Returns the bank of a fixed_prefix run's copy. InputError when the copy is not the one that the run's
    manifest froze."""
    file = path / BANK
    data = read_bytes(file, MAX_BANK_BYTES)
    entries = [parse_json(line, f"{file} line {n}") for n, line in enumerate(data.splitlines(), start=1)]
    prefixes = [_prefix(e.get("row"), e, f"{file} line {n}") for n, e in enumerate(entries, start=1)]
    require_distinct([prefix.row for prefix in prefixes], f"{file}: row")
    frozen = manifest["panel"]["bank"]
    bank = Bank(tuple(prefixes), path, manifest, frozen["ledger_sha256"])
    if sha256_file(file) != frozen["sha256"] or bank.record() != frozen:
        raise refuse(f"{file}: SHA-256", frozen["sha256"], sha256_file(file))
    return bank


def open_strata(path: Path) -> tuple[Bank, dict[str, str]]:
    """Returns the bank of a finished fixed_prefix run, and each row's stratum: "exact" where its BF16 suffixes were
    equal, else "divergent"."""
    manifest, rows = open_source(path, ("fixed_prefix",), FIXED_COMMAND)
    bank = copied_bank(path, manifest)
    strata = {
        row["row"]: "exact" if row["comparisons"]["incremental:prefill"]["suffix"]["exact"] else "divergent"
        for row in rows
        if row["dtype"] == BANK_DTYPE
    }
    if list(strata) != [prefix.row for prefix in bank.prefixes]:
        raise InputError(f"{path}: expected {BANK_DTYPE} rows for the whole bank, found {len(strata)}; {FIXED_COMMAND}")
    return bank, strata


def _prefix(row: Any, entry: Mapping[str, Any], where: str) -> Prefix:
    tokens, digest = tuple(entry["tokens"]), entry["sha256"]
    if token_digest(tokens) != digest or entry["length"] != len(tokens):
        raise refuse(f"{where}: SHA-256 of the {entry['length']} prefix tokens", digest, token_digest(tokens))
    return Prefix(str(row), tokens, digest)


def require_own_checkpoint(bank: Bank, checkpoint: Path) -> None:
    """InputError unless the checkpoint is the one that the bank's run decoded, file by file."""
    found, wanted = file_digests(checkpoint), bank.manifest["checkpoint"]
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            where = f"{checkpoint / name}: SHA-256, as the run in {bank.source} had it"
            raise refuse(where, str(wanted.get(name)), found.get(name))


def require_same_meaning(bank: Bank, contract: Contract, checkpoint: Path) -> list[str]:
    """Returns notes on another checkpoint under which the bank's tokens mean what they meant to its own.

    InputError where vocabulary, merges, delimiter ids, eligible ids, caps, visibility or role offset differ. Files that
    say the same in other bytes are noted.
    """
    found = contract_entries(contract)
    differing = compare_leaves({key: bank.manifest.get(key) for key in found}, found).lines("expected", "found")
    if differing:
        where = f"{checkpoint}: expected tokens and contract as in the run in {bank.source}"
        raise InputError(f"{where}; {'; '.join(differing[:3])}")
    digests, wanted = file_digests(checkpoint), bank.manifest["checkpoint"]
    return [
        f"{name}: other bytes than in the run in {bank.source} "
        f"(SHA-256 {digests.get(name)}, there {wanted.get(name)}); "
        "vocabulary, merges, delimiters, eligible ids and contract are equal"
        for name in ("tokenizer.json", "contract.json")
        if digests.get(name) != wanted.get(name)
    ]


def prefix_states(bank: Bank, prefixes: list[Prefix], contract: Contract, context: int) -> list[State]:
    """Replays each prefix through the contract and returns the states. InputError names the first that is no
    boundary or leaves no room."""
    states = []
    for prefix in prefixes:
        where = f"{bank.source}: prefix of row {prefix.row}"
        try:
            state = State.from_tokens(contract, prefix.tokens)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if not state.structure.at_boundary:
            raise InputError(f"{where}: expected an end right after merge's opening delimiter, found another")
        longest = len(state) + contract.suffix_limit()
        if longest > context:
            raise InputError(f"{where}: its row may reach {longest} tokens, expected at most the context {context}")
        states.append(state)
    return states
