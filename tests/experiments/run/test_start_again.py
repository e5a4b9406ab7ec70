"""A command whose copies differ starts again in MKL's reproducible mode, once, and says so in its manifest."""

import json
from pathlib import Path

import pytest
import torch

from tests.experiments.commands import ROOT, command, write_tasks

# Python imports this at its start: a kernel that spoils the second copy unless MKL's reproducible mode is chosen
BROKEN = """
import os
import torch
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
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    (root / "sitecustomize.py").write_text(BROKEN.format(condition=condition))
    write_tasks(root / "tasks.jsonl", 1)
    arguments = ["--dtype", "bf16", "--threads", "2", "--checkpoint", checkpoint, "--tasks", "tasks.jsonl", "--quiet"]
    path = f"{root}:{ROOT}"
    return command("experiments.matrix", *arguments, "--out", "run", cwd=root, PYTHONPATH=path, **extra)


SEVERAL = "torch.get_num_threads() > 1"


def test_it_starts_again_once_and_the_manifest_says_so(tmp_path: Path, tiny_directory: Path) -> None:
    done = run(tmp_path, tiny_directory, f"{SEVERAL} and 'MKL_CBWR' not in os.environ")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting again with MKL_CBWR=AUTO: two equal copies") == 1
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["environment"]["MKL_CBWR"] == "AUTO"


@pytest.mark.parametrize(
    ("condition", "chosen", "starts", "remedy"),
    [
        (SEVERAL, {}, 1, "--threads 1"),
        (SEVERAL, {"MKL_CBWR": "COMPATIBLE"}, 0, "--threads 1"),
        ("True", {}, 0, "--attention eager"),
    ],
)
def test_where_it_does_not_help_one_line_names_what_works(
    tmp_path: Path, tiny_directory: Path, condition: str, chosen: dict[str, str], starts: int, remedy: str
) -> None:
    done = run(tmp_path, tiny_directory, condition, **chosen)
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    assert len(before) == starts, "no second start where one thread has the fault too, or the user chose a mode"
    assert line.startswith("error: two equal copies get different bits at self_attn.attention")
    assert line.endswith(f"pass {remedy} (other bits)")
