"""Rows decoded together write one ledger whatever their number, and what must not be is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

import experiments.run.loop as batching
from decode.independence import Together, together_here
from experiments.run.designs import RetainedLive
from experiments.run.experiment import gate
from experiments.run.loop import CACHES, batch_size, free_bytes
from minimodel import Decoder
from tests.experiments.runs import call, inputs, ledger, one_line, run
from tests.helpers import refused

SIZES = (1, 3)
BF16: list[object] = ["--dtype", "bf16"]


def only(size: int) -> Any:
    """In place of the check: no more than `size` requests keep their bits."""
    return lambda model, most=16: Together(min(size, most), model, "the o map, 8 rows" if size < most else "")


@pytest.mark.parametrize("size", SIZES)
def test_a_matrix_writes_one_ledger_whatever_the_number(study: Path, tmp_path: Path, size: int) -> None:
    """The study's own run chose its number itself."""
    run(study, "matrix", tmp_path / "run", *BF16, "--batch-size", size)
    for name in ("rows.jsonl", "summary.json", "report.md"):
        assert (tmp_path / "run" / name).read_bytes() == (study / "runs/matrix-bf16" / name).read_bytes(), name
    said = json.loads((tmp_path / "run/manifest.json").read_text())["information"]["batch"]
    assert next(iter(said.values())).startswith(f"{size} row")
    timing = [json.loads(line) for line in (tmp_path / "run/timing.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in timing] == [row["row"] for row in ledger(tmp_path / "run")]
    assert all(sum(entry["arms"].values()) <= entry["seconds"] + 0.01 for entry in timing)


def test_the_number_is_said_on_stderr_and_kept_beside_what_decides_bits(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "together_here", only(3))
    given = [part for part in inputs(study, "--out", tmp_path / "run", *BF16) if part != "--quiet"]
    done = call("matrix", *given, cwd=study)
    why = "3 rows at a time: the o map, 8 rows of the batch: other bits than alone"
    assert done.exit_code == 0 and why in done.stderr.splitlines()
    assert json.loads((tmp_path / "run/manifest.json").read_text())["information"]["batch"] == {"all rows": why}
    again = call("matrix", *given, "--batch-size", 2, cwd=study)
    assert again.exit_code == 0, "another number resumes the same run"


def test_where_nothing_holds_rows_are_decoded_one_at_a_time(bf16: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "together_here", only(1))
    found = batch_size(bf16, None, 20, 100)
    assert found.size == 1 and found.text.startswith("1 row") and "the o map, 8 rows" in found.text
    with refused("--batch-size", "at most 1 here (the o map, 8 rows: other bits than alone), found 5"):
        batch_size(bf16, 5, 20, 100)
    assert batch_size(bf16, 1, 20, 100).size == 1


def test_a_number_that_would_change_bits_is_refused_before_the_first_row(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "together_here", only(3))
    done = call("matrix", *inputs(study, "--out", tmp_path / "run", *BF16, "--batch-size", 4), cwd=study)
    assert "--batch-size: expected at most 3 here (the o map, 8 rows: other bits than alone), found 4" in one_line(done)
    assert not (tmp_path / "run/rows.jsonl").exists()


def test_caches_that_do_not_fit_are_refused_or_fewer(bf16: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    config, longest = bf16.config, 100
    row = CACHES * 2 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * longest * 2
    monkeypatch.setattr(batching, "free_bytes", lambda device: 2 * row + 1)
    found = batch_size(bf16, None, 20, longest)
    assert found.size == min(2, together_here(bf16).size) and f"take up to {row} bytes" in found.text
    with refused("--batch-size", f"a row's caches take up to {row} bytes, and {2 * row + 1} are free", "found 3"):
        batch_size(bf16, 3, 20, longest)
    monkeypatch.setattr(batching, "free_bytes", lambda device: None)
    assert batch_size(bf16, None, 20, longest).size == together_here(bf16).size


def test_free_memory_is_some(bf16: Decoder) -> None:
    found = free_bytes(bf16.numeric.torch_device)
    assert found is None or 1 << 20 < found < 1 << 50


def test_a_preflight_that_fails_leaves_the_ledger_of_one_row_at_a_time(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RetainedLive.argmax
    monkeypatch.setattr(RetainedLive, "argmax", gate(lambda self, made: made.index != 1 and real(self, made)))
    for size in (1, 3):
        done = run(study, "matrix", tmp_path / str(size), *BF16, "--preflight", 3, "--batch-size", size, expected=3)
        assert "preflight failed: row t001: argmax" in done.stdout
    assert len(ledger(tmp_path / "3")) == 2
    assert (tmp_path / "1/rows.jsonl").read_bytes() == (tmp_path / "3/rows.jsonl").read_bytes()


def test_rows_that_end_before_an_earlier_one_are_kept_when_the_run_is_interrupted(study, tmp_path, monkeypatch):
    """The first row takes so long that the others end before it; then the run is interrupted."""
    real = RetainedLive.row
    decoded: list[int] = []

    def late(self, index, progress):
        decoded.append(index)
        row = yield from real(self, index, progress)
        if index == 0:  # again and again, so that this row ends last
            for _ in range(3):
                yield from real(self, index, progress)
            if decoded.count(0) == 1:
                raise KeyboardInterrupt
        return row

    monkeypatch.setattr(RetainedLive, "row", late)
    given = [part for part in inputs(study, "--out", tmp_path / "run", *BF16, "--preflight", 0) if part != "--quiet"]
    done = call("matrix", *given, "--batch-size", 3, cwd=study)
    assert done.exit_code == 130 and not (tmp_path / "run/rows.jsonl").exists()
    kept = [json.loads(line)["index"] for line in (tmp_path / "run/partial/rows-0.jsonl").read_text().splitlines()]
    assert kept and 0 not in kept
    again = call("matrix", *given, "--batch-size", 3, cwd=study)
    assert again.exit_code == 0 and f"{len(kept)} rows are already there and kept" in again.stderr
    assert all(decoded.count(index) == 1 for index in kept)
    assert (tmp_path / "run/rows.jsonl").read_bytes() == (study / "runs/matrix-bf16/rows.jsonl").read_bytes()
    assert not (tmp_path / "run/partial").exists()


COMMANDS: dict[str, list[object]] = {
    "fixed_prefix": [],
    "bridge": BF16,
    "transplant": BF16,
    "replication": BF16,
    "batch_control": BF16,
    "causes": ["--rows", 3, "--cell", "repeat_kv/plain", "--cell", "blocked/tiled", "--dtype", "bf16"],
    "carrier": [*BF16, "--rows", 3],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_experiment_writes_one_ledger_whatever_the_number(study: Path, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"tasks": name not in ("transplant", "replication", "carrier")}
    options["checkpoint"] = "later" if name == "replication" else "primary"
    written = set()
    for size in (1, 3, 16):
        run(study, name, tmp_path / str(size), *COMMANDS[name], "--batch-size", size, **options)
        written.add((tmp_path / str(size) / "rows.jsonl").read_bytes())
    assert len(written) == 1
