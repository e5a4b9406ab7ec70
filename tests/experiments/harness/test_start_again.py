"""A command whose copies differ starts again in MKL's reproducible mode, once, and says so in its manifest."""

import json
from pathlib import Path

import pytest

from tests.experiments.commands import ROOT, command, write_tasks

# Python imports this at its start: a kernel that spoils the second copy unless MKL's reproducible mode is chosen
BROKEN = """
import os
import minimodel.attention as attention

kernel = attention.ATTENTION_KERNELS["repeat_kv"]

def attend(query, *rest):
    out = kernel(query, *rest).clone()
    if len(out) > 1 and {condition}:
        out[1] += 1
    return out

attention.ATTENTION_KERNELS["repeat_kv"] = attend
"""


def run(root: Path, checkpoint: Path, condition: str, **extra: str):
    (root / "sitecustomize.py").write_text(BROKEN.format(condition=condition))
    write_tasks(root / "tasks.jsonl", 1)
    arguments = ["--dtype", "bf16", "--threads", "1", "--checkpoint", checkpoint, "--tasks", "tasks.jsonl", "--quiet"]
    path = f"{root}:{ROOT}"
    return command("experiments.matrix", *arguments, "--out", "run", cwd=root, PYTHONPATH=path, **extra)


def test_it_starts_again_once_and_the_manifest_says_so(tmp_path: Path, tiny_directory: Path) -> None:
    done = run(tmp_path, tiny_directory, "'MKL_CBWR' not in os.environ")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting again with MKL_CBWR=AUTO: two equal copies") == 1
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["environment"]["MKL_CBWR"] == "AUTO"


@pytest.mark.parametrize("chosen", [{}, {"MKL_CBWR": "COMPATIBLE"}])
def test_where_it_does_not_help_one_line_names_what_works(
    tmp_path: Path, tiny_directory: Path, chosen: dict[str, str]
) -> None:
    done = run(tmp_path, tiny_directory, "True", **chosen)
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    assert len(before) == (not chosen), "a mode that the user has chosen stays"
    assert line.startswith("error: two equal copies get different bits at self_attn.attention")
    assert line.endswith("pass --attention eager (other bits)")
