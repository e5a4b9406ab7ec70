"""Running a command as a user does: in a process of its own, in a directory of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import TASK

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "ABCD"


def write_tasks(path: Path, count: int) -> Path:
    """`count` small tasks of different lengths."""
    words = ["odd", "even", "prime", "round", "small", "large", "red", "old"]
    lines = [
        json.dumps(
            {
                "id": f"t{i:03d}",
                "question": f"{TASK['question']} {' '.join(words[: i % len(words)])}{i}",
                "choices": TASK["choices"],
                "answer": LETTERS[i % 4],
            }
        )
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment with this tree importable and one OpenMP thread waiting politely."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_WAIT_POLICY": "passive",
        **extra,
    }


def command(module: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` in `cwd` to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=600,
    )


def start(module: str, *arguments: object, cwd: Path, **extra: str) -> subprocess.Popen[str]:
    """Starts the same without waiting."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
