"""The benchmark on a tiny checkpoint: what it says is what was measured, and wrong bits are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import experiments.benchmark.batch as batch
from experiments.benchmark.arms import COLUMNS, available
from minimodel.bits import COPIES, bits
from minimodel.config import ModelConfig
from tests.conftest import numeric
from tests.experiments.commands import write_tasks
from tests.experiments.runs import call, one_line
from tests.tiny import CONFIG, write_checkpoint

LAYERS = {"num_hidden_layers": 2}
# a CPU that cannot pack has no packed columns
HERE, OMITTED = available(tuple(COLUMNS), numeric("bf16"), ModelConfig.from_dict({**CONFIG, **LAYERS}, "tests.tiny"))
TWIN, FLIPPED = "tests.experiments.twin", "tests.experiments.flipped_twin"
COUNTS = {"threads": 1, "repeats": 3, "long-repeats": 2, "steps": 4, "block": 24, "buffer": 1}
SHORT = ["--quiet", *(text for key, value in COUNTS.items() for text in (f"--{key}", str(value)))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, tasks, and one finished benchmark with a reference of equal bits."""
    root = tmp_path_factory.mktemp("benchmark")
    write_checkpoint(root / "tiny", config=LAYERS, contract={"caps": {"branch": 3, "merge": 4, "answer": 2}})
    write_tasks(root / "tasks.jsonl", 1)
    lengths = ["--context", "24,48", "--prefill", "48", "--prefix", "60", "--growth", "--length", "100"]
    only = "decode,prefill,build,row,batch"
    done = bench(root, "done", *lengths, "--only", only, "--reference", TWIN)
    assert done.exit_code == 0, done.output
    return root


def bench(root: Path, out: str, *more: object) -> Result:
    files = ["--checkpoint", root / "tiny", "--tasks", root / "tasks.jsonl", "--out", root / out]
    return call("benchmark", *files, *SHORT, *more, cwd=root)


def document(root: Path, out: str = "done") -> dict[str, Any]:
    return json.loads((root / out / "benchmark.json").read_text())


def test_every_row_has_every_column_with_its_samples(place: Path) -> None:
    found = document(place)
    assert found["columns"] == [*HERE, "twin"] and found["baseline"] == "twin"
    assert all(any(sentence in text for text in found["omitted"]) for sentence in OMITTED)
    names = ["decode, context 24", "decode, context 48", "prefill, 48 tokens", "incremental build, 60 tokens"]
    assert [row["name"] for row in found["rows"]] == [*names, "matrix row", "incremental build, 100 tokens"]
    counts = [3, 3, 3, 2 * 3, 2, 5]  # rounds; builds of 3 blocks, twice; the growth's 5 blocks, once
    for row, count in zip(found["rows"], counts):
        assert list(row["columns"]) == found["columns"]
        for cell in row["columns"].values():
            low, high = cell["seconds"]["quartiles"]
            assert 0 < low <= cell["seconds"]["median"] <= high and len(cell["samples"]) == count
        assert row["columns"]["twin"]["speed"]["median"] == 1.0
    assert found["machine"]["numeric"]["threads"] == 1 and found["machine"]["environment"]["torch"]


def test_bits_are_compared_with_the_reference(place: Path) -> None:
    rows = {row["name"]: row["columns"] for row in document(place)["rows"]}
    for cells in rows.values():
        same = {cell["bits_sha256"] for cell in cells.values() if cell["bits"] == "equal"}
        assert len(same) == 1 and cells["twin"]["bits_sha256"] in same
        assert {cells[name]["bits"] for name in HERE if name.startswith("repeat_kv")} == {"equal"}
    assert rows["incremental build, 100 tokens"]["invariant"]["bits"] == "differs"
    assert document(place)["broken_promises"] == []


def test_one_flipped_bit_ends_it_with_three(place: Path) -> None:
    done = bench(
        place, "flipped", "--only", "decode", "--context", "24", "--columns", "repeat_kv", "--reference", FLIPPED
    )
    assert done.exit_code == 3
    found = document(place, "flipped")
    assert found["rows"][0]["columns"]["repeat_kv"]["bits"] == "differs"
    assert found["broken_promises"] == [["decode, context 24", "repeat_kv", "flipped twin"]]
    assert "decode, context 24: repeat_kv has other bits than flipped twin" in done.output
    assert "BROKEN PROMISE" in (place / "flipped" / "report.md").read_text()
    # control: the same command with the reference as it is
    done = bench(
        place, "straight", "--only", "decode", "--context", "24", "--columns", "repeat_kv", "--reference", TWIN
    )
    assert done.exit_code == 0 and document(place, "straight")["rows"][0]["columns"]["repeat_kv"]["bits"] == "equal"


def test_floor_and_limit_stand_in_the_document(place: Path) -> None:
    found = document(place)
    decode, prefill = found["rows"][1], found["rows"][2]
    for row in (decode, prefill):
        with_floor = {name for name, cell in row["columns"].items() if "over_floor" in cell}
        assert with_floor == set(HERE) - {"invariant"}
    assert decode["limit"]["bytes"] > 0 and decode["limit"]["seconds"]["median"] > 0 and prefill["limit"] is None
    speed = decode["limit"]["gigabytes_a_second"]["median"]
    assert decode["limit"]["seconds"]["median"] == pytest.approx(decode["limit"]["bytes"] / speed / 1e9, rel=0.5)


def test_batches_have_the_bits_of_one_request_at_a_time_and_a_padded_batch_stands_beside_them(place: Path) -> None:
    entry = document(place)["batch"]
    assert entry["context"] == 48 and list(entry["series"]) == [*HERE, "twin", "twin, padded batch"]
    for name, cells in entry["series"].items():
        sizes = ["2", "4", "8", "16"] if name == "twin, padded batch" else ["1"] if name == "twin" else cells
        assert list(cells) == list(sizes)
        for cell in cells.values():
            assert len(cell["samples"]) == 2 and cell["seconds"]["median"] > 0
            assert cell["bits"] == "equal" or "padded" in name
    per_token = 2 * 2 * COPIES * 2 * 32 * 2
    assert entry["cache_bytes"] == {str(size): size * 48 * per_token for size in entry["sizes"]}
    text = (place / "done" / "report.md").read_text()
    assert "Requests decoded together, context 48" in text and (place / "done/figures/batch.svg").exists()


def test_a_batch_of_other_bits_ends_it_with_three(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = batch.take_together

    def flawed(steps: Any, together: Any) -> Any:
        found = real(steps, together)
        bits(steps[-1].stepper.cache.values(0))[:, 0, -1, 0] ^= 1
        return found

    monkeypatch.setattr(batch, "take_together", flawed)
    done = bench(place, "flawed", "--only", "batch", "--context", "24", "--columns", "repeat_kv")
    assert done.exit_code == 3 and ": repeat_kv has other bits than repeat_kv one at a time" in done.output
    cells = document(place, "flawed")["batch"]["series"]["repeat_kv"]
    assert cells["1"]["bits"] == "equal" and {cell["bits"] for size, cell in cells.items() if size != "1"} == {
        "differs"
    }


def test_growth_is_of_the_build(place: Path) -> None:
    growth = document(place)["growth"]
    assert growth["ends"] == [24, 48, 72, 96, 100]
    per_token = 2 * 2 * COPIES * 2 * 32 * 2  # keys and values, layers, copies, K/V heads, head size, bytes
    assert growth["cache_bytes"] == [end * per_token for end in growth["ends"]]
    for name, totals in growth["total_seconds"].items():
        steps = growth["step_seconds"][name]
        assert totals[-1] == pytest.approx(sum(s * k for s, k in zip(steps, (24, 24, 24, 24, 4))))
        assert totals == sorted(totals)
    figures = sorted(path.name for path in (place / "done" / "figures").glob("*.svg"))
    assert figures == ["batch.svg", "growth-build.svg", "growth-cache.svg", "growth-step.svg"]


def test_report_holds_the_tables(place: Path) -> None:
    text = (place / "done" / "report.md").read_text()
    for part in ("decode, context 48: ms", "prefill, 48 tokens: tokens/s", "matrix row: s", "over its floor", "bits"):
        assert part in text
    assert (place / "done" / "report.html").exists()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--context", "24,2000"), ("--context", "max_position_embeddings 1024", "2000")),
        (("--context", "4"), ("--context", "10 to")),
        (("--context", "many"), ("--context", "whole numbers", "'many'")),
        (("--columns", "repeat_kv,fast"), ("--columns", "'fast'")),
        (("--only", "everything"), ("--only", "'everything'")),
        (("--reference", "no.such.module"), ("--reference no.such.module", "can be imported")),
        (("--reference", "json"), ("--reference json", "open_arm")),
        (("--checkpoint", "nowhere"), ("nowhere",)),
    ],
)
def test_bad_input_is_one_line(place: Path, more: tuple[str, ...], parts: tuple[str, ...]) -> None:
    line = one_line(bench(place, "refused", *more))
    assert all(part in line for part in parts), line
    assert not (place / "refused").exists()


def test_an_earlier_benchmark_is_kept(place: Path, tmp_path: Path) -> None:
    few = ("--only", "prefill", "--prefill", "30", "--columns", "repeat_kv")
    assert bench(place, "twice", *few).exit_code == 0
    assert "--fresh" in one_line(bench(place, "twice", *few))
    assert bench(place, "twice", *few, "--fresh").exit_code == 0
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("x")
    assert "found no benchmark.json" in one_line(bench(place, "mine", *few, "--fresh"))
    assert [path.name for path in place.glob("mine*")] == ["mine"]
    assert document(place, "twice")["rows"] and document(place, "twice.1")["rows"]
