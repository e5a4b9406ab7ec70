"""One small study for the experiments' tests, and one run of every experiment, each made when a test first reads it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.experiments.runs import call, run, write_study

BF16 = ("--dtype", "bf16")
COMMANDS = {  # name: command, its arguments, and the study's inputs that it takes
    "matrix-fp32": ("matrix", ("--dtype", "fp32"), {}),
    "bridge": ("bridge", BF16, {}),
    "transplant": ("transplant", BF16, {"tasks": False}),
    "replication": ("replication", BF16, {"tasks": False, "checkpoint": "later"}),
    "batch_control": ("batch_control", BF16, {}),
    "stock_control": ("stock_control", (*BF16, "--limit", 2), {"checkpoint": "stock"}),
    # two cells of one precision, and a second precision, so that one id stands in several rows
    "causes": (
        "causes",
        ("--rows", 2, "--cell", "repeat_kv/plain", "--cell", "eager/plain", *BF16, "--dtype", "fp32"),
        {},
    ),
    "carrier": ("carrier", (*BF16, "--rows", 2), {"tasks": False}),
}


class EveryRun(Mapping[str, Path]):
    """The directory of one finished run per experiment, the matrix in both precisions. No test may write into them."""

    def __init__(self, study: Path, root: Path) -> None:
        self._study, self._root = study, root
        self._made = {"matrix": study / "runs/matrix-bf16", "fixed_prefix": study / "runs/fixed_prefix-bf16-fp32"}
        self.printed: dict[str, str] = {}  # standard output by name

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            out = self._root / (f"{name}-bf16" if name in ("transplant", "replication") else name)
            if name == "audit":
                done = call("audit", self["matrix"], self["fixed_prefix"], "--out", out, cwd=self._study)
                assert done.exit_code == 0, done.output
            else:
                command, arguments, more = COMMANDS[name]
                done = run(self._study, command, out, *arguments, **more)
            self._made[name], self.printed[name] = out, done.stdout
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*COMMANDS, "audit", "matrix", "fixed_prefix"))

    def __len__(self) -> int:
        return len(COMMANDS) + 3


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """primary/, later/, stock/, tasks.jsonl, runs/matrix-bf16, runs/fixed_prefix-bf16-fp32. No test may write here."""
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def every_run(study: Path, tmp_path_factory: pytest.TempPathFactory) -> EveryRun:
    return EveryRun(study, tmp_path_factory.mktemp("every"))


@pytest.fixture(scope="session")
def reported(every_run: EveryRun) -> list[Path]:
    """The runs that the report is tested on."""
    return [every_run[name] for name in ("matrix", "fixed_prefix", "transplant", "replication")]
