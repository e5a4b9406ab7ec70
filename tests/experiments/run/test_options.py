"""The manifest: a run is resumed on the same machine only, by every variable and every fact of the record; the digest
and the commit of the code."""

import subprocess

import pytest

from experiments.run import inputs, options
from experiments.run.options import NO_ROWS, ROOT, code_sha256, deciding_files, git_state
from minimodel.machine import machine_record
from tests.experiments.commands import write_tasks
from tests.experiments.runs import call, one_line
from tests.test_rooms import PRODUCT, graph

CHANGED = {"MKL_CBWR": "COMPATIBLE", "OMP_DYNAMIC": "false"}  # tests/minimodel/test_machine.py has all of them
SMALL = ["--dtype", "bf16", "--threads", "1", "--limit", "1", "--quiet"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_directory):
    """A directory with one finished run of one row."""
    root = tmp_path_factory.mktemp("environment")
    write_tasks(root / "tasks.jsonl", 1)
    done = resume(root, tiny_directory)
    assert done.exit_code == 0, done.output
    return root


def resume(root, checkpoint):
    tasks = root / "tasks.jsonl"
    return call("matrix", *SMALL, "--checkpoint", checkpoint, "--tasks", tasks, "--out", root / "run", cwd=root)


@pytest.mark.parametrize("name", CHANGED)
def test_a_resume_under_another_variable_is_refused_by_name(name, place, tiny_directory, monkeypatch):
    before = (place / "run" / "rows.jsonl").read_bytes()
    monkeypatch.setenv(name, CHANGED[name])
    line = one_line(resume(place, tiny_directory))
    assert f'environment.{name}: expected "{CHANGED[name]}", found nothing' in line and "--fresh" in line
    monkeypatch.delenv(name)
    assert resume(place, tiny_directory).exit_code == 0
    assert (place / "run" / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_resume_on_another_machine_is_refused_by_name(name, place, tiny_directory, monkeypatch):
    monkeypatch.setattr(inputs, "machine_record", lambda: {**machine_record(), name: "another"})
    assert f'environment.{name}: expected "another", found' in one_line(resume(place, tiny_directory))


def test_the_codes_digest_covers_rows_and_verdicts_and_not_the_style_sheet(tmp_path, monkeypatch):
    names = {path.relative_to(ROOT).as_posix() for path in deciding_files(ROOT)}
    deciding = {
        "minimodel/decoder.py",
        "experiments/run/experiment.py",
        "experiments/matrix.py",
        "experiments/audit.py",
    }
    assert deciding | {"stats/endpoints.py", "cache/kv.py", "experiments/causes/rules.py"} <= names
    assert not names & {"experiments/report/style.py", "experiments/report/html.py", "experiments/study.py"}
    for room in ("minimodel", "experiments/run", "experiments/report"):
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "a.py").write_text("x = 1")
    monkeypatch.setattr(options, "ROOT", tmp_path)
    found = [code_sha256()]
    for path in ("experiments/report/a.py", "minimodel/a.py", "experiments/run/a.py"):
        (tmp_path / path).write_text("x = 2")
        found.append(code_sha256())
    assert found[0] == found[1] and len(set(found)) == 3


def test_what_the_digest_leaves_out_decides_nothing_that_it_covers():
    """A module that is covered imports none that is left out, but for the report that ends a run."""
    left_out = tuple(f"experiments.{name.removesuffix('.py')}" for name in NO_ROWS)
    edges = graph(PRODUCT)
    covered = [name for name in edges if not name.startswith(left_out)]
    used = {used for name in covered for used in edges[name] if used.startswith(left_out)}
    assert covered and {name for name in used if not name.startswith("experiments.report")} == set()


def test_the_commit_is_that_of_the_trees_own_repository_alone(tmp_path, monkeypatch):
    """A git repository with one commit, and a package installed below it."""

    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        words = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    installed = tmp_path / "site-packages"
    (installed / "minimodel").mkdir(parents=True)
    (installed / "minimodel/x.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        git(*words)
    monkeypatch.setattr(options, "ROOT", tmp_path.resolve())
    assert git_state() == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    (installed / "minimodel/x.py").write_text("x = 2\n")
    assert git_state()["git_dirty"] is True
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert git_state() == {"git_commit": None, "git_dirty": None}, "without git"
    monkeypatch.setattr(options, "ROOT", installed.resolve())
    assert git_state() == {"git_commit": None, "git_dirty": None}, "installed below another repository"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("matrix", [*SMALL, option, ""]) for option in ("--out", "--checkpoint", "--tasks")),
        ("fixed_prefix", ["--source", ""]),
        ("report", ["--out", ""]),
        ("report", [""]),
        ("show", ["", "t000"]),
        ("audit", ["", ""]),
        ("crosscheck", ["", ""]),
        ("paired", ["", ""]),
        ("prepare", ["--out", ""]),
        ("published", [""]),
    ],
)
def test_an_empty_path_is_not_the_working_directory(tmp_path, name, arguments):
    """As `--out "$DIR"` gives it where the variable is not set."""
    done = call(name, *arguments, cwd=tmp_path)
    assert done.exit_code == 2 and "expected a path, found an empty text" in done.stderr, done.output
    assert not list(tmp_path.iterdir())
