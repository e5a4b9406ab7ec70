"""Adapting a public directory: what is written runs and names its digests; what cannot be adapted leaves nothing."""

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from decode import Contract, State
from experiments import matrix
from tests.experiments.adapt.bases import adapted, run, write_base
from tests.helpers import edit_json
from tests.tiny import TASK


def test_the_matrix_runs_on_it_and_blocks_can_close(tmp_path: Path) -> None:
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--role-std", 0.3, "--role-seed", 4)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({**TASK, "id": "a", "answer": "C"}) + "\n")
    arguments = ["--dtype", "bf16", "--checkpoint", out, "--tasks", tmp_path / "tasks.jsonl", "--out", tmp_path / "run"]
    result = CliRunner().invoke(matrix.main, [str(a) for a in (*arguments, "--threads", 1, "--quiet")])
    assert result.exit_code == 0 and "gates all passed" in result.stdout, result.output


def test_digests_template_and_typed_delimiters(tmp_path: Path) -> None:
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--template", "Q: {question}|{choices}")
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    contract = Contract.load(out)
    assert contract.caps == (None, 6, 6, 6, 6, 4)
    state = State.prompt(contract, "<|merge|> and <|im_end|>", ["a"])
    assert contract.codec.decode(state.tokens[1:-1]) == "Q: <|merge|> and <|im_end|>|A. a"
    assert not set(state.tokens[1:-1]) & {*contract.open_ids, *contract.close_ids, 258}


def test_bad_bases_and_options_are_one_line_and_leave_nothing(tmp_path: Path, tiny_directory: Path) -> None:
    base = write_base(tmp_path / "base")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    faults = [
        (["--base", tiny_directory], "adapted checkpoint"),
        (["--base", tmp_path / "none"], "found nothing"),
        (["--base", base, "--open-like", "<|nope|>"], "--open-like"),
        (["--base", base, "--template", "no place"], "prompt_template"),
        (["--base", base, "--out", tmp_path / "full"], "empty directory"),
        (["--base", base, "--role-table", tmp_path / "none.pt"], "found nothing"),
        (["--base", base, "--role-table", tmp_path / "none.pt", "--role-std", 1], "--role-std"),
    ]
    for arguments, part in faults:
        result = run("--out", tmp_path / "out", *arguments)
        assert result.exit_code == 2 and part in result.stderr and result.stderr.count("\n") == 1, result.output
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-2])
    assert "damaged" in run("--base", base, "--out", tmp_path / "out").stderr
    (base / "model.safetensors").write_bytes(data)
    edit_json(base / "config.json", vocab_size=258)  # fewer rows than the tokenizer's ids
    assert run("--base", base, "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("spelling", [".", "./", "..", "../here/."])
def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    base = write_base(tmp_path / "base")
    here = tmp_path / "around" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    result = run("--base", base, "--out", spelling)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert "expected a new directory, found the working directory or one above it" in result.stderr
    assert [path.name for path in (tmp_path / "around").rglob("*")] == ["here"]
    assert run("--base", base, "--out", "new").exit_code == 0, "the control: a directory below it"
    assert Contract.load(here / "new")


def test_a_snapshot_of_the_hub_cache_is_a_base(tmp_path: Path) -> None:
    """hf download puts every file under blobs/ and fills snapshots/REVISION with links to them."""
    base, model = write_base(tmp_path / "base"), tmp_path / "hub" / "models--a--b"
    snapshot = model / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for path in base.iterdir():
        path.rename(model / "blobs" / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    result = run("--base", snapshot, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (snapshot / "config.json").unlink()
    (tmp_path / "config.json").write_bytes((model / "blobs" / "blob-of-config.json").read_bytes())
    (snapshot / "config.json").symlink_to(tmp_path / "config.json")
    result = run("--base", snapshot, "--out", tmp_path / "other")
    assert result.exit_code == 2 and "--local-dir" in result.stderr, "the control: a link out of the model's folder"
