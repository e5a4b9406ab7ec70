"""Starting a command as a user does: in a new process, in a directory that the test chose."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiny import TASK

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "ABCD"


def write_tasks(path: Path, count: int) -> Path:
    """`count` small tasks of different lengths."""
    words = ["odd", "even", "prime", "round", "small", "large", "red", "old"]
    with open(path, "w") as file:
        for i in range(count):
            question = f"{TASK['question']} {' '.join(words[: i % len(words)])}{i}"
            task = {"id": f"t{i:03d}", "question": question, "choices": TASK["choices"], "answer": LETTERS[i % 4]}
            file.write(json.dumps(task) + "\n")
    return path


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment, in which this tree can be imported and waiting threads yield."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", **extra}


def _started(module: str, arguments: tuple[object, ...], cwd: Path, extra: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return {"args": command, "cwd": cwd, "env": environment(**extra), "text": True}


def command(module: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` in `cwd` to its end."""
    return subprocess.run(**_started(module, arguments, cwd, extra), capture_output=True, timeout=600)


def start(module: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Starts the same without waiting."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(**_started(module, arguments, cwd, extra), **pipes)
