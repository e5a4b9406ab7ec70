"""Adapting a public directory: what is written runs and names its digests; what cannot be adapted leaves nothing."""

import hashlib

import pytest

from decode import Contract, State
from decode.contract import OPEN
from tests.experiments.adapt.bases import adapted, write_base
from tests.experiments.runs import call, one_line
from tests.helpers import edit_json, read_json, write_lines
from tests.tiny import TASK


def test_the_matrix_runs_on_it_and_blocks_can_close(tmp_path):
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--role-std", 0.3, "--role-seed", 4)
    tasks = write_lines(tmp_path / "tasks.jsonl", {**TASK, "id": "a", "answer": "C"})
    given = ["--checkpoint", out, "--tasks", tasks, "--threads", 1, "--quiet"]
    done = call("matrix", "--dtype", "bf16", *given, cwd=tmp_path)
    assert done.exit_code == 0 and "gates all passed" in done.stdout, done.output


def test_digests_template_and_typed_delimiters(tmp_path):
    (tmp_path / "out").mkdir()  # an empty directory may be there
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--template", "Q: {question}|{choices}")
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    contract = Contract.load(out)
    assert contract.caps == (None, 6, 6, 6, 6, 4)
    state = State.prompt(contract, "<|merge|> and <|im_end|>", ["a"])
    assert contract.codec.decode(state.tokens[1:-1]) == "Q: <|merge|> and <|im_end|>|A. a"
    assert not set(state.tokens[1:-1]) & {*contract.open_ids, *contract.close_ids, 258}


def test_bad_bases_and_options_are_one_line_and_leave_nothing(tmp_path, tiny_directory):
    base, out = write_base(tmp_path / "base"), ("--out", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "rest.part").mkdir()
    for name, spare, entry in (("named", 5, {OPEN[4]: 262}), ("beyond", 5, {"zz": 300}), ("gap", 60, {"zz": 300})):
        model = read_json(write_base(tmp_path / name, spare) / "tokenizer.json")["model"]
        edit_json(tmp_path / name / "tokenizer.json", model={**model, "vocab": {**model["vocab"], **entry}})
    for part, *arguments in (
        ("adapted checkpoint", "--base", tiny_directory),
        ("found nothing", "--base", tmp_path / "none"),
        ("--open-like", "--base", base, "--open-like", "<|nope|>"),
        ("prompt_template", "--base", base, "--template", "no place"),
        ("empty directory", "--base", base, "--out", tmp_path / "full"),
        ("rest of an interrupted command", "--base", base, "--out", tmp_path / "rest"),
        ("no ordinary token of this name, found 262", "--base", tmp_path / "named"),
        ("below the base's vocab_size 264, found 300", "--base", tmp_path / "beyond"),
        ("expected new ids above 300, found [", "--base", tmp_path / "gap"),
        ("found nothing", "--base", base, "--role-table", tmp_path / "none.pt"),
        ("--role-std", "--base", base, "--role-table", tmp_path / "none.pt", "--role-std", 1),
    ):
        one_line(call("adapt", *out, *arguments), part)
    for option, value in (("--role-std", "nan"), ("--role-std", "inf"), ("--out", ""), ("--role-table", "")):
        done = call("adapt", *out, "--base", base, option, value)
        assert done.exit_code == 2 and f"Invalid value for '{option}'" in done.stderr, done.output
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-2])
    one_line(call("adapt", "--base", base, *out), "damaged")
    (base / "model.safetensors").write_bytes(data)
    edit_json(base / "config.json", vocab_size=258)
    one_line(call("adapt", "--base", base, *out), "258")  # fewer rows than the tokenizer has ids
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("spelling", [".", "./", "..", "../here/."])
def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch, spelling):
    base, here = write_base(tmp_path / "base"), tmp_path / "around" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    line = "expected a new directory, found the working directory or one above it"
    one_line(call("adapt", "--base", base, "--out", spelling), line)
    assert [path.name for path in (tmp_path / "around").rglob("*")] == ["here"]
    assert call("adapt", "--base", base, "--out", "new").exit_code == 0, "the control: a directory below it"
    assert Contract.load(here / "new")


def test_a_snapshot_of_the_hub_cache_is_a_base(tmp_path):
    """hf download puts every file under blobs/ and fills snapshots/REVISION with links to them."""
    base, model = write_base(tmp_path / "base"), tmp_path / "hub" / "models--a--b"
    plain = adapted(base, tmp_path / "plain")
    snapshot, blobs = model / "snapshots" / "0a1b", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in base.iterdir():
        path.rename(blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    out = adapted(snapshot, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {p.name: p.read_bytes() for p in plain.iterdir()}
    (snapshot / "config.json").unlink()
    (tmp_path / "config.json").write_bytes((blobs / "blob-of-config.json").read_bytes())
    (snapshot / "config.json").symlink_to(tmp_path / "config.json")
    # a link out of the model's folder
    one_line(call("adapt", "--base", snapshot, "--out", tmp_path / "other"), "--local-dir")
