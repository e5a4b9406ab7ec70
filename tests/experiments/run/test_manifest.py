"""The manifest's record of the code: whose commit it is."""

import subprocess
from pathlib import Path

import pytest

from experiments.run import options as manifest
from experiments.run.options import git_state


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with one commit, and a package installed below it."""
    (tmp_path / "site-packages" / "minimodel").mkdir(parents=True)
    (tmp_path / "site-packages" / "minimodel" / "x.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_the_commit_is_that_of_the_trees_own_repository_alone(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "ROOT", repository.resolve())
    assert git_state() == {"git_commit": git(repository, "rev-parse", "HEAD"), "git_dirty": False}
    (repository / "site-packages" / "minimodel" / "x.py").write_text("x = 2\n")
    assert git_state()["git_dirty"] is True
    monkeypatch.setattr(manifest, "ROOT", (repository / "site-packages").resolve())
    assert git_state() == {"git_commit": None, "git_dirty": None}, "installed below somebody else's repository"
