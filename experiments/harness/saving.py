"""Writing boundaries and traces beside a ledger, which they never change: `--save-boundaries`, `--trace ROW`."""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.storage import Provenance
from experiments.harness.trace import Trace
from minimodel.decoder import Observe
from minimodel.errors import refuse

BOUNDARIES, TRACES = "boundaries", "traces"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def file_name(row: str, arm: str) -> str:
    """ROW-ARM.safetensors; a row id that is no plain file name is replaced by the start of its SHA-256."""
    name = row if PLAIN_NAME.fullmatch(row) else "id-" + hashlib.sha256(row.encode("utf-8")).hexdigest()[:16]
    return f"{name}-{arm}.safetensors"


@dataclass(frozen=True)
class Saving:
    """What a run writes beside its ledger."""

    directory: Path  # the run's
    boundaries: bool  # of every row
    rows: frozenset[str]  # those that are traced
    last: int | None  # token slots that a trace keeps; None: all
    provenance: Provenance | None  # None where nothing is saved
    _traces: dict[tuple[str, str], Trace] = field(default_factory=dict, repr=False)

    @classmethod
    def chosen(
        cls,
        directory: Path,
        boundaries: bool,
        rows: Iterable[str],
        last: int | None,
        row_order: Iterable[str],
        provenance: Callable[[], Provenance],
    ) -> "Saving":
        """InputError for a traced row that the run does not have. `provenance` is called only if something is saved."""
        known, wanted = set(row_order), frozenset(rows)
        for row in sorted(wanted - known):
            raise refuse("--trace", "an id of the tasks", row)
        return cls(directory, boundaries, wanted, last, provenance() if boundaries or wanted else None)

    def observe(self, row: str, arm: str) -> Observe | None:
        """The observer of one construction, None where the row is not traced."""
        if row not in self.rows:
            return None
        self._traces[row, arm] = Trace(self.last)
        return self._traces[row, arm].observe

    def write(self, row: str, arm: str, boundary: Boundary) -> None:
        """Writes the files that were asked for of this construction."""
        if self.provenance is None:
            return
        if self.boundaries:
            boundary.save(self.directory / BOUNDARIES / file_name(row, arm), self.provenance, row)
        trace = self._traces.pop((row, arm), None)
        if trace is not None:
            trace.save(self.directory / TRACES / file_name(row, arm), boundary, self.provenance, row)

    def missing(self, rows: Iterable[str], arms: Iterable[str]) -> list[str]:
        """Returns the files that were asked for and are not there: rows resumed from a run without these flags."""
        arms = list(arms)
        wanted = [Path(BOUNDARIES) / file_name(row, arm) for row in rows for arm in arms if self.boundaries]
        wanted += [Path(TRACES) / file_name(row, arm) for row in sorted(self.rows) for arm in arms]
        return [str(path) for path in wanted if not (self.directory / path).exists()]

    def notes(self, rows: Iterable[str], arms: Iterable[str]) -> list[str]:
        """Returns a line for stderr where files are missing."""
        missing = self.missing(rows, arms)
        if not missing:
            return []
        more = f" and {len(missing) - 1} more were" if len(missing) > 1 else " was"
        fix = "the rows being kept from before; use --fresh or another --out"
        return [f"{self.directory}: {missing[0]}{more} not written, {fix}"]


NOTHING_SAVED = Saving(Path(), False, frozenset(), None, None)


def saving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--save-boundaries, --trace ROW (repeatable), --trace-last N."""
    for option in (
        click.option(
            "--trace-last",
            type=click.IntRange(min=1),
            default=None,
            metavar="N",
            help="Traces keep only the last N token slots. [default: all]",
        ),
        click.option(
            "--trace",
            "traced",
            multiple=True,
            metavar="ROW",
            help="Write every numeric step of this row's constructions under traces/; may be repeated.",
        ),
        click.option("--save-boundaries", is_flag=True, help="Write K, V and logits of every row under boundaries/."),
    ):
        command = option(command)
    return command
