"""Run directories read back for the report, with a line for each fault; their compared arms, in all and by row."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from experiments.report.texts import Texts, read_texts
from experiments.run.directory import MANIFEST, TIMING, read_run
from experiments.run.exits import readable
from experiments.run.ledger import row_key
from experiments.run.records import ArmEntry, Comparison, Manifest, PairEndpoints, Row, Summary, Timing, fields
from experiments.run.summary import matched_prefixes
from minimodel.errors import InputError, refuse
from minimodel.files import parse_json, read_bytes
from stats.donors import DONORS
from stats.endpoints import first_divergence
from stats.margins import margin_ulps

CONSTRUCTIONS = ("incremental", "prefill")
# arm of a whole-cache transplant: (donor, recipient of the cache); the native constructions keep their own cache
TRANSPLANTS = {arm: DONORS.get(arm, (arm, arm)) for arm in ("incremental", *reversed(DONORS), "prefill")}
# the arms that an experiment compares, the first pair that a row holds
COMPARED = (("live", "prefill"), ("incremental", "prefill"), ("live", "incremental"), ("singleton", "pair"))


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path
    name: str  # as tables head their columns with it
    anchor: str  # its identifier within a page
    manifest: Manifest
    summary: Summary  # empty while the run is unfinished
    rows: Sequence[Row] = ()
    timing: Sequence[Timing] = ()

    @property
    def experiment(self) -> str:
        return str(self.manifest["experiment"])

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(one["dtype"] for one in self.manifest["numeric"]))

    @cached_property
    def texts(self) -> Texts:
        """The tokenizer, contract and tasks behind the rows' token ids."""
        return read_texts(self.manifest)

    def faults(self) -> list[str]:
        """Returns one line for each thing that keeps this run's numbers from being used as they stand."""
        found = [f"row {row_key(row)} failed {failure(row)}" for row in self.rows if not row["passed"]]
        if not self.summary:
            found.insert(0, f"unfinished, {len(self.rows)} of {len(self.manifest['row_order'])} rows")
        elif not self.summary["passed"] and not found:
            found.append("the summary says that a gate failed")
        return [f"{self.name}: {text}" for text in found]


def failure(row: Row) -> str:
    """Returns the gates that a row failed, and the recorded reason; empty where it passed."""
    names = ", ".join(gate for gate, passed in row["gates"].items() if not passed)
    return f"{names} ({row['failure']})" if names and row.get("failure") else names


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Returns the runs in the order given. InputError for what is no run directory, damaged, or contradicts itself."""
    runs: list[Run] = []
    for path in paths:
        if any(path.resolve() == run.path.resolve() for run in runs):
            raise refuse("runs", "each run once", str(path))
        base = "run-" + (re.sub(r"[^A-Za-z0-9]+", "-", path.name).strip("-").lower() or "unnamed")
        anchors = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        anchor = next(one for one in anchors if one not in {run.anchor for run in runs})
        read, timing = read_run(path), path / TIMING
        lines = read_bytes(timing).split(b"\n")[:-1] if timing.exists() else []
        times = fields([parse_json(line, timing) for line in lines if line], list[Timing], timing)
        rows, summary = list(read.rows.values()), cast(Summary, read.summary or {})
        runs.append(Run(path, readable(path.name), anchor, read.manifest, summary, rows, times))
    return runs


def find_runs(root: Path) -> list[Path]:
    """Returns the run directories under `root`, by name, without those set aside by --fresh (NAME.1, ...)."""
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    kept = [path for path in found if not re.fullmatch(r".+\.\d+", path.name)]
    if not kept:
        raise InputError(f"{root}: expected run directories, found none; make them with: python -m experiments.study")
    return kept


def at(values: Sequence[Any], index: int) -> Any:
    """Returns the value at an index; None beyond the end."""
    return values[index] if index < len(values) else None


def suffix_of(arm: ArmEntry) -> list[int]:
    """Returns what an arm decoded: its suffix, or all tokens after the prompt in a batch control."""
    return arm.get("suffix", arm.get("tokens", []))


def follows(arms: dict[str, ArmEntry], arm: str) -> str:
    """Returns the constructions whose suffix the arm repeats, or "neither"."""
    suffix = arms[arm]["suffix_sha256"]
    return " and ".join(name for name in CONSTRUCTIONS if arms[name]["suffix_sha256"] == suffix) or "neither"


@dataclass(frozen=True)
class ArmPair:
    """Two compared arms of one row, and their choices where the suffixes diverge."""

    row: Row
    arms: tuple[str, str]
    dtype: str

    @property
    def entry(self) -> Comparison:
        """The ledger's comparison; empty where it holds none."""
        return self.row["comparisons"].get(":".join(self.arms), {})

    @cached_property
    def suffixes(self) -> list[list[int]]:
        return [suffix_of(self.row["arms"][arm]) for arm in self.arms]

    @cached_property
    def first(self) -> int | None:
        """The first differing token, counted from the boundary; None where the suffixes are equal."""
        return first_divergence(*self.suffixes)

    @cached_property
    def margins(self) -> list[float | None]:
        """Best logit less the second best at the divergence, per arm; None where forced, ended or not recorded."""
        if self.first is None or "logits" not in self.entry:
            return [None, None]
        return [at(self.row["arms"][arm].get("margins", []), self.first) for arm in self.arms]

    @cached_property
    def ulps(self) -> list[float | None]:
        """The margins in units in the last place of the best logit."""
        tops = self.entry.get("suffix", {}).get("tops", [None, None])
        return [margin_ulps(margin, top, self.dtype) for margin, top in zip(self.margins, tops)]

    @property
    def margin(self) -> float | None:
        """The smaller margin: how far the choice was from going the other way."""
        return min((one for one in self.margins if one is not None), default=None)

    @property
    def ulp(self) -> float | None:
        return min((one for one in self.ulps if one is not None), default=None)

    @property
    def drift(self) -> float:
        """The largest difference of the two boundary logits; the ledger holds none of later logits."""
        return float(self.entry["logits"]["max_abs"])

    @property
    def before(self) -> int:
        """How many earlier choices of the first arm have a margin of at most `drift`. Both arms agreed at each."""
        earlier = self.row["arms"][self.arms[0]].get("margins", [])[: self.first]
        return sum(margin is not None and margin <= self.drift for margin in earlier)

    @property
    def answer_changed(self) -> bool:
        """Whether the arms state different answers; by their answers' tokens where no answer is scored."""
        left, right = (self.row["arms"][arm].get("answer") for arm in self.arms)
        return not self.entry.get("answer_equal", left == right)


def compared(run: Run, row: Row) -> ArmPair | None:
    """Returns the pair of arms that the row's experiment compares; None where it failed closed or decodes nothing."""
    arms = next((pair for pair in COMPARED if set(pair) <= set(row.get("arms", ()))), None)
    dtype = str(row.get("dtype") or row.get("cell", run.dtypes[0])).split("/")[0]
    return None if arms is None else ArmPair(row, arms, dtype)


@dataclass(frozen=True)
class Pair:
    """One comparison of two arms in one precision of a run."""

    run: Run
    dtype: str
    arms: tuple[str, str]
    summary: PairEndpoints
    rows: list[ArmPair]  # that hold the comparison

    @property
    def label(self) -> str:
        return f"{self.run.name}, {self.dtype}"


def pairs(run: Run) -> Iterator[Pair]:
    """Yields every pair of arms that the run's summary compares over at least one row."""
    first = next(iter(run.dtypes), "")
    for dtype, block in [(first, run.summary), *run.summary.get("precisions", {}).items()]:
        if block.get("compared_rows") and "suffix_disagreement" in block and "comparison" in block:
            left, right = str(block["comparison"]).split(":")
            rows = [ArmPair(row, (left, right), dtype) for row in run.rows if row.get("dtype", first) == dtype]
            yield Pair(run, dtype, (left, right), block, [one for one in rows if one.entry])


def matched_matrices(runs: Sequence[Run]) -> Iterator[tuple[Run, Run, dict[str, Any]]]:
    """Yields every two finished matrices of one task file and checkpoint in two precisions, with their joined prefixes
    (`summary.matched_prefixes`)."""
    matrices = [run for run in runs if run.experiment == "matrix" and run.rows and run.summary]
    for left, right in itertools.combinations(matrices, 2):
        same = all(left.manifest.get(key) == right.manifest.get(key) for key in ("tasks_sha256", "checkpoint"))
        if same and left.dtypes != right.dtypes:
            yield left, right, matched_prefixes(left.rows, right.rows, (left.dtypes[0], right.dtypes[0]))
