"""Cross-checking two runs: equal rows, rows another kernel explains, one changed value, what cannot be compared."""

import json
import shutil

import pytest
from click.testing import CliRunner

from experiments import matrix
from experiments.run.ledger import seal
from tests.experiments.crosschecks import checked, run
from tests.tiny import TASK


def write_tasks(path, count):
    rows = [{**TASK, "id": f"r{i}", "question": f"Which one is odd, {i}?", "answer": "C"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_matrix(directory, tasks, out, *more):
    inputs = ["--dtype", "bf16", "--checkpoint", directory, "--tasks", tasks, "--out", out, "--threads", 1, "--quiet"]
    result = CliRunner().invoke(matrix.main, [str(a) for a in (*inputs, *more)])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_directory):
    """Three runs of the same two rows: plain, with everything saved, and under another kernel."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = write_tasks(folder / "tasks.jsonl", 2)
    saved = ("--save-boundaries", "--trace", "r1")
    return {
        "plain": run_matrix(tiny_directory, tasks, folder / "plain"),
        "saved": run_matrix(tiny_directory, tasks, folder / "saved", *saved),
        "eager": run_matrix(tiny_directory, tasks, folder / "eager", *saved, "--attention", "eager"),
    }


def test_saving_changes_no_byte_of_the_ledger(runs):
    assert (runs["plain"] / "rows.jsonl").read_bytes() == (runs["saved"] / "rows.jsonl").read_bytes()
    written = sorted(str(p.relative_to(runs["saved"])) for p in runs["saved"].rglob("*.safetensors"))
    names = [f"boundaries/r{i}-{arm}.safetensors" for i in (0, 1) for arm in ("live", "prefill")]
    assert written == [*names, "traces/r1-live.safetensors", "traces/r1-prefill.safetensors"]
    result = run(runs["plain"], runs["saved"])
    assert result.exit_code == 0 and "2 of 2 common rows equal" in result.stdout, result.output


def test_a_run_under_another_kernel_is_explained_row_by_row(runs):
    report = checked(runs["plain"], runs["eager"], "--explain", 2)
    assert [row["equal"] for row in report["rows"]] == [False, False]
    for findings in report["findings"].values():
        for finding in findings:
            if finding["first"] is not None and finding["kernels"]:
                assert "repeat_kv" in finding["kernels"]["A"] and "eager" in finding["kernels"]["B"]
                assert finding["first"]["tensor"] == "self_attn.attention"
    assert any(f["construction"] == "live" for found in report["findings"].values() for f in found)


def edited(run_directory, copy, change):
    """A copy whose manifest and first row are changed."""
    shutil.copytree(run_directory, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    first_line, *rest = (copy / "rows.jsonl").read_text().splitlines()
    row = {k: v for k, v in json.loads(first_line).items() if k != "row_sha256"}
    change(manifest, row)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (copy / "rows.jsonl").write_text("\n".join([seal(row), *rest]) + "\n")
    return copy


def test_a_changed_and_a_missing_ledger_value_are_named(runs, tmp_path):
    def change(manifest, row):
        row["arms"]["prefill"]["margin"] += 0.125
        del row["index"]

    report = checked(runs["plain"], edited(runs["plain"], tmp_path / "copy", change), "--no-rerun")
    assert [row["equal"] for row in report["rows"]] == [False, True]
    assert report["rows"][0]["differing"][0].startswith("arms.prefill.margin: ")
    assert report["rows"][0]["one_sided"] == ["index: A 0, B nothing"]


@pytest.mark.parametrize("key", ["checkpoint", "caps", "visibility", "role_offset", "dtype", "prompt", "experiment"])
def test_runs_of_different_things_are_refused(runs, tmp_path, key):
    def change(manifest, row):
        if key == "dtype":
            manifest["numeric"][0]["dtype"] = "fp32"
        elif key == "prompt":
            row["prefix"]["tokens"][1] += 1
        else:
            manifest[key] = {"config.json": "0"} if key == "checkpoint" else "other"

    result = run(runs["plain"], edited(runs["plain"], tmp_path / "copy", change))
    assert result.exit_code == 2 and key in result.stderr and result.stderr.count("\n") == 1, result.output


def test_live_prefixes_that_part_are_named_at_the_token(runs, tmp_path):
    def change(manifest, row):
        row["prefix"]["tokens"][-4] += 1

    copy = edited(runs["saved"], tmp_path / "copy", change)
    (row,) = checked(runs["plain"], copy)["findings"].values()
    length = len(json.loads((runs["plain"] / "rows.jsonl").read_text().splitlines()[0])["prefix"]["tokens"])
    assert f"the prefixes part at token {length - 4}: A " in row[0]["lines"][0]
