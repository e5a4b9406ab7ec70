"""A small study on a tiny checkpoint, its commands called in this process as a user calls them: the same main, the same
exit codes."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from experiments.run.directory import read_finished
from experiments.run.ledger import row_key, seal, without
from experiments.run.summary import gate_counts
from tests.experiments.commands import write_tasks
from tests.helpers import read_json, write_lines
from tests.tiny import write_checkpoint

# on the machine where this was written, random weights of this seed make divergent and exact rows; no test needs it
SEED, ROWS = 9, 4
CAPS = {"branch": 4, "merge": 28, "answer": 4}
CONFIG = {"num_hidden_layers": 2}


def command_module(module: str) -> ModuleType:
    """The module that holds a command's `main`: itself, or the `__main__` of a package."""
    found = importlib.import_module(module)
    return found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")


def call(name: str, *arguments: object, cwd: Path | None = None) -> Result:
    """`python -m experiments.NAME ARGUMENTS`, in `cwd` where it is given, without a new process."""
    main = command_module(f"experiments.{name}").main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd or Path.cwd())
        patch.setattr("sys.argv", [name, *map(str, arguments)])
        return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def write_study(root: Path) -> Path:
    """Two adapted checkpoints and a stock one, tasks, and the finished runs that the other experiments start from."""
    write_checkpoint(root / "primary", seed=SEED, config=CONFIG, contract={"caps": CAPS})
    write_checkpoint(root / "later", seed=SEED + 1, config=CONFIG, contract={"caps": CAPS})
    write_checkpoint(root / "stock", seed=SEED, config=CONFIG, stock=True)
    write_tasks(root / "tasks.jsonl", ROWS)
    for name, more in (("matrix", ["--dtype", "bf16"]), ("fixed_prefix", [])):
        done = call(name, *more, *inputs(root), cwd=root)
        assert done.exit_code == 0, done.output
    return root


def inputs(study: Path, *more: object, tasks: bool = True, checkpoint: str = "primary") -> list[object]:
    """The options that name the study's checkpoint and tasks."""
    files = ["--tasks", study / "tasks.jsonl"] if tasks else []
    return ["--checkpoint", study / checkpoint, *files, "--threads", 1, "--quiet", *more]


def run(study: Path, name: str, out: Path, *more: object, expected: int = 0, **options: Any) -> Result:
    """One command of the study, its run directory elsewhere."""
    done = call(name, *inputs(study, "--out", out, *more, **options), cwd=study)
    assert done.exit_code == expected, (done.exit_code, done.output, done.stderr)
    return done


def one_line(done: Result, *parts: str) -> str:
    """The refusal of a command: exit code 2, nothing on stdout, and one line on stderr that holds every part."""
    assert done.exit_code == 2 and done.stdout == "", (done.exit_code, done.output)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert all(part in lines[0] for part in parts), (parts, lines[0])
    return lines[0]


def crosscheck(left: Path, right: Path, *more: object) -> dict[str, Any]:
    """The JSON report of `experiments.crosscheck` on two files or runs, which must be found different."""
    done = call("crosscheck", left, right, "--json", *more)
    assert done.exit_code == 3, done.output
    report = json.loads(done.stdout)
    assert not report["equal"]
    return report


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]


def open_finished(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The manifest, rows and summary of a finished run."""
    run, summary = read_finished(path)
    return run.manifest, list(run.rows.values()), summary


def summary_of(run: Path) -> dict[str, Any]:
    return read_json(run / "summary.json")


def manifest_of(run: Path) -> dict[str, Any]:
    return read_json(run / "manifest.json")


def rewrite(run: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a ledger of altered rows, each sealed anew: no damage that the seal could see."""
    write_lines(run / "rows.jsonl", *(seal(without(row, "row_sha256")) for row in rows))


def altered(run: Path, target: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of a run with changed rows, to which manifest and summary are fitted: only the rows show the change."""
    shutil.copytree(run, target)
    manifest, rows, summary = open_finished(target)
    change(rows)
    rewrite(target, rows)
    (target / "manifest.json").write_text(json.dumps({**manifest, "row_order": [row_key(row) for row in rows]}))
    (target / "summary.json").write_text(json.dumps({**summary, "rows": len(rows), "gates": gate_counts(rows)}))
    return target


def rename(rows: list[dict[str, Any]]) -> None:
    """Gives every row another id."""
    for row in rows:
        row["row"] += "x"


def change_at(place: Any, path: str, change: Callable[[Any], Any]) -> None:
    """Replaces the value at a path such as `layers.1.key` by what `change` makes of it."""
    *outer, last = path.split(".")
    for step in outer:
        place = place[int(step) if isinstance(place, list) else step]
    key = int(last) if isinstance(place, list) else last
    place[key] = change(place[key])


def interrupt(patch: pytest.MonkeyPatch, module: str, name: str, after: int) -> None:
    """Lets a module's function work `after` times and then be interrupted, as by Ctrl-C."""
    target = importlib.import_module(module)
    real, calls = getattr(target, name), iter(range(after))

    def stopped(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*given, **named)

    patch.setattr(target, name, stopped)
