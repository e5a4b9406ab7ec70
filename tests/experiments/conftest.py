"""One small study for the experiments' tests, and the runs that the report is tested on: each is made once."""

from pathlib import Path

import pytest

from tests.experiments.runs import run, write_study


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """primary/, later/, tasks.jsonl, runs/matrix-bf16, runs/fixed_prefix-bf16-fp32. No test may write into it."""
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def reported(study: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The study's two runs, a transplant and a small replication."""
    root = tmp_path_factory.mktemp("report")
    run(study, "transplant", root / "transplant-bf16", "--dtype", "bf16", "--limit", 3, tasks=False)
    more = ["--dtype", "bf16", "--limit", 2]
    run(study, "replication", root / "replication-bf16", *more, tasks=False, checkpoint="later")
    known = [study / "runs/matrix-bf16", study / "runs/fixed_prefix-bf16-fp32"]
    return [*known, root / "transplant-bf16", root / "replication-bf16"]
