"""Turns samples into the entries of benchmark.json: medians, quartiles, ratios, equal or differing bits, promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from experiments.benchmark.arms import COLUMNS, Arm
from experiments.benchmark.child import Peak
from experiments.benchmark.measures import Measured
from experiments.run.costs import Spread, ratios

EQUAL, DIFFERS = "equal", "differs"


@dataclass(frozen=True)
class Baseline:
    """The column that the others are compared with: the reference if there is one, else our first."""

    name: str
    promises: tuple[tuple[str, str], ...]  # (column, column whose bits it must have)

    @classmethod
    def of(cls, arms: Sequence[Arm], dtype: str) -> "Baseline":
        reference = next((arm for arm in arms if arm.name not in COLUMNS), None)
        promises = []
        for arm in arms:
            if arm is reference:
                continue
            attention, linear = COLUMNS[arm.name]
            plain = next((a.name for a in arms if a.name in COLUMNS and COLUMNS[a.name] == (attention, "plain")), None)
            if linear == "packed" and dtype != "fp32" and plain is not None:
                promises.append((arm.name, plain))
            keeps = linear == "plain" or (linear == "packed" and dtype != "fp32")
            if reference is not None and attention == reference.kernel and keeps:
                promises.append((arm.name, reference.name))
        return cls(arms[0].name if reference is None else reference.name, tuple(promises))


def row_entry(measured: Measured, baseline: Baseline) -> dict[str, Any]:
    """Returns one row of benchmark.json. Times are in seconds; `speed` is how many times as fast as the baseline."""
    limit = None if measured.bytes is None else [each * measured.bytes for each in measured.read]
    base = measured.seconds[baseline.name]
    columns = {}
    for name, seconds in measured.seconds.items():
        entry: dict[str, Any] = {
            "seconds": Spread.of(measured.totals.get(name, seconds)).as_dict(),
            "samples": seconds,
            "bits": EQUAL if measured.bits[name] == measured.bits[baseline.name] else DIFFERS,
            "bits_sha256": measured.bits[name],
            "speed": ratios(base, seconds).as_dict(),
        }
        if name in measured.floors:
            entry["floor_seconds"] = Spread.of(measured.floors[name]).as_dict()
            entry["over_floor"] = ratios(seconds, measured.floors[name]).as_dict()
        if limit is not None:
            entry["over_limit"] = ratios(seconds, limit).as_dict()
        columns[name] = entry
    broken = [[a, b] for a, b in baseline.promises if measured.bits[a] != measured.bits[b]]
    return {
        "name": measured.name,
        "unit": measured.unit,
        "tokens": measured.tokens,
        "load_average": list(measured.load),
        "detail": measured.detail,
        "limit": None if limit is None else _limit(measured, limit),
        "columns": columns,
        "broken_promises": broken,
    }


def _limit(measured: Measured, seconds: list[float]) -> dict[str, Any]:
    assert measured.bytes is not None, "a limit is of so many bytes"
    bandwidth = Spread.of([1e-9 / each for each in measured.read]).as_dict()
    return {"bytes": measured.bytes, "gigabytes_a_second": bandwidth, "seconds": Spread.of(seconds).as_dict()}


def memory_entry(children: dict[str, list[Peak]], baseline: str, weights: int) -> dict[str, Any]:
    """Returns load time and peak memory of fresh processes. `weights`: bytes of the weights in the model dtype."""
    columns = {}
    for name, found in children.items():
        base = [one["seconds"] for one in children[baseline]]
        seconds = [one["seconds"] for one in found]
        columns[name] = {
            "seconds": Spread.of(seconds).as_dict(),
            "samples": seconds,
            "speed": ratios(base, seconds).as_dict(),
            "imports": Spread.of([one["imports"] for one in found]).as_dict(),
            "loaded": Spread.of([one["loaded"] for one in found]).as_dict(),
            "peak": Spread.of([one["peak"] for one in found]).as_dict(),
        }
    return {"weights": weights, "columns": columns}


def growth_entry(measured: Measured) -> dict[str, Any]:
    """Returns, per block of one incremental build: its end, seconds per step, seconds so far and bytes of K/V."""
    ends = measured.detail["ends"]
    sizes = [stop - start for start, stop in pairwise([0, *ends])]
    return {
        "length": measured.detail["length"],
        "ends": ends,
        "step_seconds": {n: [s / k for s, k in zip(found, sizes)] for n, found in measured.seconds.items()},
        "total_seconds": {n: list(accumulate(found)) for n, found in measured.seconds.items()},
        "cache_bytes": measured.detail["cache_bytes"],
        "load_average": list(measured.load),
    }
