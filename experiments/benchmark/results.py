"""From samples to what is written: medians, quartiles, ratios, equal or different bits, and the promises they keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.benchmark.arms import COLUMNS, Arm
from experiments.benchmark.bench import Measured
from experiments.benchmark.timing import Spread, ratios

EQUAL, DIFFERS = "equal", "differs"


@dataclass(frozen=True)
class Baseline:
    """The column that the others are held against: the reference where there is one, else our first.

    promises: (column, column whose bits it must have).
    """

    name: str
    promises: tuple[tuple[str, str], ...]

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
    """One row of benchmark.json. Times in seconds; `speed`: times as fast as the baseline, sample by sample."""
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


def memory_entry(children: dict[str, list[dict[str, Any]]], baseline: str, weights: int) -> dict[str, Any]:
    """Load time and peak memory, each of fresh processes. `weights`: bytes of the weights in the model dtype."""
    columns = {}
    for name, found in children.items():
        base = [one["seconds"] for one in children[baseline]]
        seconds = [one["seconds"] for one in found]
        columns[name] = {
            "seconds": Spread.of(seconds).as_dict(),
            "samples": seconds,
            "speed": ratios(base, seconds).as_dict(),
            **{key: Spread.of([one[key] for one in found]).as_dict() for key in ("imports", "loaded", "peak")},
        }
    return {"weights": weights, "columns": columns}
