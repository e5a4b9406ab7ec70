"""One table of default kernels, whole-cache transplants and batch-invariant kernels, with their cost."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.blocks import Cell, Paragraph, Section, table
from experiments.report.runs import Run, pairs
from experiments.report.tables import head
from experiments.report.values import rate
from minimodel.numerics import KERNELS

DEFAULT, INVARIANT = "/".join(KERNELS["repeat_kv"]), "/".join(KERNELS["invariant"])


@dataclass(frozen=True)
class Compared:
    """Two constructions compared under one pair of kernels in one run."""

    run: Run
    dtype: str
    kernels: str  # ATTENTION/LINEAR
    summary: dict[str, Any]
    seconds: dict[str, float]  # by row id
    chunks: dict[str, Any]  # the chunk curve of a causes cell; empty elsewhere


def side_by_side(runs: Sequence[Run]) -> Section | None:
    """The table; None unless some run has the default kernels and some run the invariant ones."""
    found = [one for run in runs for one in compared(run)]
    if not {DEFAULT, INVARIANT} <= {one.kernels for one in found}:
        return None
    lines = [_line(one, found) for one in found if one.kernels != INVARIANT]
    lines += [line for run in runs for line in _transplants(run)]
    lines += [_line(one, found) for one in found if one.kernels == INVARIANT]
    header = ["what", "run", "dtype", "cache bit-exact", "suffix", "chunk sizes exact", "cost per row"]
    intro = Paragraph(
        "By default the constructions differ in bits; a suffix follows the cache that it is given; where every kernel "
        "is batch-invariant, nothing differs. The cost is the median, over rows that both decoded, of this line's "
        "seconds over the default's in the same experiment and precision; seconds of a shared machine are rough."
    )
    return Section("Default, transplant, invariant", "side-by-side", (intro, table("Side by side", header, lines)))


def compared(run: Run) -> Iterator[Compared]:
    """Yields the run's comparisons; of a causes run, the cells under default and under invariant kernels.

    A transplant run yields none: its rows were chosen by their outcome, or decoded by another checkpoint.
    """
    if run.summary is None or _recovery(run):
        return
    for pair in pairs(run):
        kernels = next(f"{n['attention']}/{n['linear']}" for n in run.manifest["numeric"] if n["dtype"] == pair.dtype)
        yield Compared(run, pair.dtype, kernels, pair.summary, {t["row"]: t["seconds"] for t in run.timing}, {})
    for name, summary in run.summary.get("cells", {}).items():
        dtype, kernels = name.split("/", 1)
        if kernels in (DEFAULT, INVARIANT) and summary["compared_rows"]:
            seconds = {t["row"].removeprefix(f"{name}/"): t["arms"][name] for t in run.timing if name in t["arms"]}
            yield Compared(run, dtype, kernels, summary, seconds, run.summary["chunks"].get(name, {}))


def _line(one: Compared, found: Sequence[Compared]) -> list[Cell]:
    summary, n = one.summary, one.summary["compared_rows"]
    exact = sum(curve["exact_rows"] == curve["rows"] for curve in one.chunks.values())
    name = {DEFAULT: "default, ", INVARIANT: "invariant, "}.get(one.kernels, "")
    return [
        name + one.kernels,
        head(one.run),
        one.dtype,
        f"{summary['cache']['exact_rows']}/{n}",
        f"differs {rate(summary['suffix_disagreement'])}",
        f"{exact} of {len(one.chunks)}" if one.chunks else "not measured",
        _cost(one, found),
    ]


def _cost(one: Compared, found: Sequence[Compared]) -> str:
    if one.kernels == DEFAULT:
        return "1"
    for base in found:
        alike = (base.run.experiment, base.dtype) == (one.run.experiment, one.dtype)
        rows = [row for row in one.seconds if row in base.seconds]
        if base.kernels == DEFAULT and alike and rows:
            ratio = statistics.median(one.seconds[row] / base.seconds[row] for row in rows)
            return f"{ratio:.2f} ({len(rows)} rows)"
    return "not measured"


def _recovery(run: Run) -> dict[str, Any] | None:
    return ((run.summary or {}).get("endpoints") or {}).get("bidirectional_donor_recovery")


def _transplants(run: Run) -> Iterator[list[Cell]]:
    recovery = _recovery(run)
    if recovery:
        [numeric] = run.manifest["numeric"]
        what = f"whole cache transplanted, {numeric['attention']}/{numeric['linear']}"
        suffix = f"follows its donor both ways {rate(recovery)}"
        yield [what, head(run), numeric["dtype"], "the donor's", suffix, "not measured", "not measured"]
