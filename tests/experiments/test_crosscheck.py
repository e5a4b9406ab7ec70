"""Cross-checking two runs: equal rows, rows another kernel explains, one changed value, what cannot be compared."""

import json
import shutil

import pytest

from tests.experiments.commands import write_tasks
from tests.experiments.runs import altered, call, change_at, crosscheck, ledger, manifest_of, one_line, rename
from tests.helpers import edit_json

SAVED = ("--save-boundaries", "--trace", "t001")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, tiny_directory):
    """Runs the same two rows into a directory."""
    tasks = write_tasks(tmp_path_factory.mktemp("tasks") / "tasks.jsonl", 2)

    def matrix(out, *more):
        files = ["--checkpoint", tiny_directory, "--tasks", tasks, "--out", out]
        done = call("matrix", "--dtype", "bf16", *files, "--threads", 1, "--quiet", *more)
        assert done.exit_code == 0, done.output
        return done

    return matrix


@pytest.fixture(scope="module")
def runs(matrix, tmp_path_factory):
    """Three runs: plain, with everything saved, and under another kernel."""
    folder, options = tmp_path_factory.mktemp("runs"), {"plain": (), "saved": SAVED}
    for name, more in (options | {"eager": (*SAVED, "--attention", "eager")}).items():
        matrix(folder / name, *more)
    return {path.name: path for path in folder.iterdir()}


def test_rows_kept_from_a_run_without_saved_tensors_are_named(matrix, runs, tmp_path):
    done = matrix(shutil.copytree(runs["plain"], tmp_path / "run"), *SAVED)
    assert "boundaries/t000-live.safetensors and 5 more were not written, the rows being kept" in done.stderr


def test_saving_changes_no_byte_of_the_ledger(runs):
    assert (runs["plain"] / "rows.jsonl").read_bytes() == (runs["saved"] / "rows.jsonl").read_bytes()
    written = sorted(str(p.relative_to(runs["saved"])) for p in runs["saved"].rglob("*.safetensors"))
    names = [f"boundaries/t00{i}-{arm}.safetensors" for i in (0, 1) for arm in ("live", "prefill")]
    assert written == [*names, "traces/t001-live.safetensors", "traces/t001-prefill.safetensors"]
    result = call("crosscheck", runs["plain"], runs["saved"])
    assert result.exit_code == 0 and "2 of 2 common rows equal" in result.stdout, result.output


def test_a_run_under_another_kernel_is_explained_row_by_row(runs):
    report = crosscheck(runs["saved"], runs["eager"])
    assert [row["equal"] for row in report["rows"]] == [False, False] and list(report["findings"]) == ["t000"]
    for findings in report["findings"].values():
        for finding in findings:
            if finding["first"] is not None and finding["kernels"]:
                assert "repeat_kv" in finding["kernels"]["A"] and "eager" in finding["kernels"]["B"]
                assert finding["first"]["tensor"] == "self_attn.attention"
    assert any(f["construction"] == "live" for found in report["findings"].values() for f in found)


def test_what_cannot_be_computed_again_is_said(runs, tmp_path, stock_directory):
    def left(checkpoint):
        copy = shutil.copytree(runs["plain"], tmp_path / checkpoint.name)
        edit_json(copy / "manifest.json", information={"checkpoint": str(checkpoint)})
        return copy

    report = crosscheck(runs["plain"], runs["eager"], "--no-rerun")
    assert any("--save-boundaries --trace ROW" in line for f in report["findings"]["t000"] for line in f["lines"])
    other = "expected the recorded checkpoint, found another contract.json"
    report = crosscheck(left(stock_directory), runs["eager"])
    note = f"not computed again: {stock_directory}: {other}"
    assert any(line.startswith(note) for line in report["environment"])
    gone = left(tmp_path / "nowhere/gone")
    report = crosscheck(
        gone, altered(gone, tmp_path / "other", lambda rows: change_at(rows[0], "index", lambda index: index + 1))
    )
    assert "not computed again: the recorded checkpoint is not here; pass --checkpoint" in report["environment"]
    for more, line in (
        (("--checkpoint", stock_directory), other),
        (("--no-rerun", "--checkpoint", stock_directory), "--no-rerun: expected no --checkpoint beside it"),
    ):
        one_line(call("crosscheck", runs["plain"], runs["eager"], *more), line)
    others = altered(runs["plain"], tmp_path / "others", rename)
    one_line(call("crosscheck", runs["plain"], others), "expected at least one row of")


def test_a_changed_and_a_missing_ledger_value_are_named(runs, tmp_path):
    def change(rows):
        rows[0]["arms"]["prefill"]["margin"] += 0.125
        del rows[0]["index"]

    report = crosscheck(runs["plain"], altered(runs["plain"], tmp_path / "copy", change), "--no-rerun")
    assert [row["equal"] for row in report["rows"]] == [False, True]
    assert report["rows"][0]["differing"][0].startswith("arms.prefill.margin: ")
    assert report["rows"][0]["one_sided"] == ["index: A 0, B nothing"]


@pytest.mark.parametrize(
    ("arm", "key"), [("prefill", "suffix"), ("prefill", "margins"), ("prefill_replica", "margins")]
)
def test_a_kernel_has_the_bits_of_a_boundary_and_of_its_suffix(runs, tmp_path, arm, key):
    def change(rows):
        rows[0]["arms"][arm][key][-1] = 7

    [[found]] = crosscheck(runs["plain"], altered(runs["plain"], tmp_path / "copy", change))["findings"].values()
    assert found["construction"] == arm
    assert "repeat_kv" in found["kernels"]["A"] and found["kernels"]["B"] == []


@pytest.mark.parametrize("key", ["checkpoint", "caps", "visibility", "role_offset", "dtype", "prompt", "experiment"])
def test_runs_of_different_things_are_refused(runs, tmp_path, key):
    def change(rows):
        rows[0]["prefix"]["tokens"][1] += key == "prompt"

    copy = altered(runs["plain"], tmp_path / "copy", change)
    manifest = manifest_of(copy)
    if key == "dtype":
        manifest["numeric"][0]["dtype"] = "fp32"
    elif key != "prompt":
        manifest[key] = {"config.json": "0"} if key == "checkpoint" else "other"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    one_line(call("crosscheck", runs["plain"], copy), key)


def test_live_prefixes_that_part_are_named_at_the_token(runs, tmp_path):
    """The first differing step before it too, where both runs kept the trace."""
    plain = ledger(runs["plain"])[1]
    tokens = plain["prefix"]["tokens"]
    parted = {**plain["prefix"], "tokens": [*tokens[:-4], tokens[-4] + 1, *tokens[-3:]]}

    def change(rows):
        rows[1].update(prefix=parted, prefix_margins=plain["prefix_margins"])

    for left, right, step in (("plain", "saved", None), ("saved", "eager", "self_attn.attention")):
        copy = altered(runs[right], tmp_path / right, change)
        [found] = crosscheck(runs[left], copy, "--explain", 2, "--no-rerun")["findings"]["t001"]
        assert f"the prefixes part at token {len(tokens) - 4}: A " in found["lines"][0]
        assert (found["first"] and found["first"]["tensor"]) == step
