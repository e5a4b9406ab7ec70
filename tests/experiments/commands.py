"""Starting a command as a user does: in a new process, in a directory that the test chose."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import write_lines
from tests.tiny import TASK

ROOT = Path(__file__).resolve().parents[2]


def write_tasks(path: Path, count: int) -> Path:
    """`count` small tasks of different lengths."""
    words = ["odd", "even", "prime", "round", "small", "large", "red", "old"]
    questions = [f"{TASK['question']} {' '.join(words[: i % len(words)])}{i}" for i in range(count)]
    tasks = ({**TASK, "id": f"t{i:03d}", "question": q, "answer": "ABCD"[i % 4]} for i, q in enumerate(questions))
    return write_lines(path, *tasks)


def environment(**extra: str | None) -> dict[str, str]:
    """The caller's environment, in which this tree can be imported and waiting threads yield; None removes a name."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    whole = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", **extra}
    return {name: value for name, value in whole.items() if value is not None}


def _started(words: tuple[object, ...], cwd: Path, extra: dict[str, Any]) -> dict[str, Any]:
    return {"args": [sys.executable, *map(str, words)], "cwd": cwd, "env": environment(**extra), "text": True}


def python(*words: object, cwd: Path = ROOT, **extra: str | None) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` in `cwd` to its end."""
    return subprocess.run(**_started(words, cwd, extra), capture_output=True, timeout=600)


def command(module: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` in `cwd` to its end."""
    return python("-m", module, *arguments, cwd=cwd, **extra)


def start(module: str, *arguments: object, cwd: Path, **extra: str | None) -> subprocess.Popen[str]:
    """Starts the same without waiting."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(**_started(("-m", module, *arguments), cwd, extra), **pipes)
