"""Cross-checking two runs: equal rows, rows another kernel explains, one changed value, what cannot be compared."""

import json

import pytest

from tests.experiments.commands import write_tasks
from tests.experiments.runs import altered, call, crosscheck, ledger, manifest_of, one_line


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_directory):
    """Three runs of the same two rows: plain, with everything saved, and under another kernel."""
    folder, saved = tmp_path_factory.mktemp("runs"), ("--save-boundaries", "--trace", "t001")
    given = ["--dtype", "bf16", "--checkpoint", tiny_directory, "--tasks", write_tasks(folder / "tasks.jsonl", 2)]
    options = {"plain": (), "saved": saved, "eager": (*saved, "--attention", "eager")}
    for name, more in options.items():
        done = call("matrix", *given, "--threads", 1, "--quiet", "--out", folder / name, *more)
        assert done.exit_code == 0, done.output
    return {name: folder / name for name in options}


def test_saving_changes_no_byte_of_the_ledger(runs):
    assert (runs["plain"] / "rows.jsonl").read_bytes() == (runs["saved"] / "rows.jsonl").read_bytes()
    written = sorted(str(p.relative_to(runs["saved"])) for p in runs["saved"].rglob("*.safetensors"))
    names = [f"boundaries/t00{i}-{arm}.safetensors" for i in (0, 1) for arm in ("live", "prefill")]
    assert written == [*names, "traces/t001-live.safetensors", "traces/t001-prefill.safetensors"]
    result = call("crosscheck", runs["plain"], runs["saved"])
    assert result.exit_code == 0 and "2 of 2 common rows equal" in result.stdout, result.output


def test_a_run_under_another_kernel_is_explained_row_by_row(runs):
    report = crosscheck(runs["plain"], runs["eager"], "--explain", 2)
    assert [row["equal"] for row in report["rows"]] == [False, False]
    for findings in report["findings"].values():
        for finding in findings:
            if finding["first"] is not None and finding["kernels"]:
                assert "repeat_kv" in finding["kernels"]["A"] and "eager" in finding["kernels"]["B"]
                assert finding["first"]["tensor"] == "self_attn.attention"
    assert any(f["construction"] == "live" for found in report["findings"].values() for f in found)


def test_a_changed_and_a_missing_ledger_value_are_named(runs, tmp_path):
    def change(rows):
        rows[0]["arms"]["prefill"]["margin"] += 0.125
        del rows[0]["index"]

    report = crosscheck(runs["plain"], altered(runs["plain"], tmp_path / "copy", change), "--no-rerun")
    assert [row["equal"] for row in report["rows"]] == [False, True]
    assert report["rows"][0]["differing"][0].startswith("arms.prefill.margin: ")
    assert report["rows"][0]["one_sided"] == ["index: A 0, B nothing"]


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
    def change(rows):
        rows[0]["prefix"]["tokens"][-4] += 1

    copy = altered(runs["saved"], tmp_path / "copy", change)
    (row,) = crosscheck(runs["plain"], copy)["findings"].values()
    length = len(ledger(runs["plain"])[0]["prefix"]["tokens"])
    assert f"the prefixes part at token {length - 4}: A " in row[0]["lines"][0]
