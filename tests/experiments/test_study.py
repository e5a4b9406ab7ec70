"""The study: its order, its codes, what it passes on, and that it resumes."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from experiments.study import Step, run_steps, run_study, study_steps
from tests.experiments.commands import command, start
from tests.experiments.runs import inputs

ORDER = (
    "matrix matrix fixed_prefix bridge audit transplant replication batch_control causes carrier".split()  # noqa: SIM905
)


def steps_in(root, limit=None):
    given = dict.fromkeys(("device", "kernels", "attention", "linear", "batch_size"))
    given |= {"threads": 1, "reduced_precision": False, "quiet": True}
    given |= {"checkpoint": root / "primary", "tasks": root / "tasks.jsonl"}
    return study_steps(root / "runs", root / "later", limit, given)


def test_the_steps_stand_in_the_papers_order_and_feed_one_another(tmp_path):
    steps = steps_in(tmp_path, limit=7)
    assert [step.name for step in steps] == ORDER
    assert len({step.out for step in steps}) == len(steps)
    made: set[Path] = set()
    for step in steps:
        given = [step.arguments[i + 1] for i, a in enumerate(step.arguments) if a == "--source"]
        given += step.arguments[:2] if step.name == "audit" else ()
        assert set(given) <= made, f"{step.out} starts from what no step before it makes"
        assert step.arguments[step.arguments.index("--out") + 1] == step.out
        assert ("--limit" in step.arguments) == (step.name in ("matrix", "batch_control"))
        assert step.name == "audit" or {"--threads=1", "--quiet", "--no-reduced-precision"} <= set(step.arguments)
        assert not any(str(text).startswith("--kernels") for text in step.arguments)
        made.add(step.out)
    checkpoints = {s.out.name: s.arguments[s.arguments.index("--checkpoint") + 1] for s in steps if s.name != "audit"}
    assert {title for title, path in checkpoints.items() if path == tmp_path / "later"} == {"replication-bf16"}


def script(monkeypatch, codes):
    """Steps that only exit: code by title, 0 where none is named."""
    ran = []

    def shell(step):
        ran.append(step)
        return [sys.executable, "-c", f"import sys; sys.exit({codes.get(step.out.name, 0)})"]

    monkeypatch.setattr(Step, "command", shell)
    rates = {"precisions": {"bf16": {"suffix_disagreement": {"count": 0 if "nothing" in codes else 1}}}}
    monkeypatch.setattr("experiments.study.read_json_object", lambda path: rates)
    return ran


def titles(steps):
    return [step.out.name for step in steps]


def test_the_first_failure_ends_the_study_with_its_code(tmp_path, monkeypatch, capsys):
    ran = script(monkeypatch, {"fixed_prefix-bf16-fp32": 3})
    assert run_study(tmp_path / "runs", steps_in(tmp_path), True) == 3
    assert titles(ran) == ["matrix-bf16", "matrix-fp32", "fixed_prefix-bf16-fp32"]
    printed = capsys.readouterr()
    assert "fixed_prefix-bf16-fp32 ended with code 3" in printed.err and "report:" not in printed.out
    assert [line.split()[-1] for line in printed.out.splitlines()] == titles(ran), (
        "the wall time of each step is printed"
    )


def test_a_whole_study_ends_with_the_report(tmp_path, monkeypatch, capsys):
    steps = [step for step in steps_in(tmp_path) if step.name != "causes"]
    ran = script(monkeypatch, {})
    assert run_study(tmp_path / "runs", steps, True) == 0
    assert ran[:-1] == steps and ran[-1].out == tmp_path / "runs/report"
    assert ran[-1].arguments == (*(step.out for step in steps), "--out", tmp_path / "runs/report")
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'runs/report/report.html'}"
    ran = script(monkeypatch, {"nothing": 1})
    assert run_study(tmp_path / "runs", steps, True) == 0 and "carrier-bf16" not in titles(ran)


def test_several_steps_at_once(tmp_path, monkeypatch):
    """A step starts only when the runs that it reads have ended; the report names the runs in the study's order."""
    steps, log = steps_in(tmp_path), tmp_path / "log"
    # each step writes when it starts and ends
    code = "import sys, time; f = open(sys.argv[1], 'a', 1); print('+', sys.argv[2], file=f); "
    code += "time.sleep(float(sys.argv[3])); print('-', sys.argv[2], file=f)"

    def shell(step):
        return [
            sys.executable,
            "-c",
            code,
            log,
            step.out.name,
            {"matrix-fp32": "0", "causes": "1"}.get(step.name, "0.2"),
        ]

    script(monkeypatch, {})
    monkeypatch.setattr(Step, "command", shell)
    assert run_study(tmp_path / "runs", steps, True, jobs=3) == 0
    seen: set[str] = set()
    at_once = most = 0
    for sign, title in (line.split() for line in log.read_text().splitlines()):
        at_once += 1 if sign == "+" else -1
        most = max(most, at_once)
        if sign == "-":
            seen.add(title)
            continue
        reads = [s.arguments for s in steps if s.out.name == title] or [tuple(s.out for s in steps)]
        made = {s.out.name for s in steps if s.out in reads[0]} - {title}
        assert made <= seen, title
    assert most == 3 and seen == {*titles(steps), "report"}


def test_after_a_failure_no_step_starts_and_those_that_run_end(tmp_path, monkeypatch, capsys):
    ran = script(monkeypatch, {"matrix-bf16": 3})
    assert run_study(tmp_path / "runs", steps_in(tmp_path), True, jobs=3) == 3
    assert {"matrix-bf16", "matrix-fp32", "batch_control-bf16"} == {*titles(ran)}, "the others read the failed run"
    assert {line.split()[-1] for line in capsys.readouterr().out.splitlines()} == {*titles(ran)}


def test_an_interrupted_or_killed_step(tmp_path, monkeypatch):
    """The others that run are interrupted too, and waited for."""
    seconds: dict[Path, float] = {}
    steps = [Step("matrix", tmp_path / name, ()) for name in ("long", "step")]
    stop = {"long": "trap 'sleep 0.3; exit 130' TERM; sleep 60 & wait", "step": "sleep 0.3; exit 130"}
    monkeypatch.setattr(Step, "command", lambda step: ["sh", "-c", stop[step.out.name]])
    with pytest.raises(KeyboardInterrupt):
        run_steps(steps, True, 2, seconds)
    assert set(seconds) == {step.out for step in steps} and 0.5 < seconds[tmp_path / "long"] < 30
    monkeypatch.setattr(Step, "command", lambda step: ["sh", "-c", "kill -9 $$"])
    assert run_steps(steps, True, 1, {}) == 137


def test_bad_input_stops_at_the_first_step(tmp_path):
    done = command("experiments.study", "--tasks", tmp_path / "none.jsonl", "--quiet", "--threads", 1, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and "the study stopped: matrix-bf16 ended with code 2" in done.stderr


@pytest.mark.slow
def test_a_study_from_nothing_interrupted_and_resumed(study, tmp_path):
    arguments = ["--out", tmp_path / "runs", "--later", study / "later", "--limit", 4, "--jobs", 2, *inputs(study)]
    process = start("experiments.study", *arguments, cwd=tmp_path)
    ledger = tmp_path / "runs/matrix-bf16/rows.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130 and "resume with: python -m experiments.study --out" in printed
    kept = ledger.read_bytes()
    done = command("experiments.study", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ledger.read_bytes().startswith(kept) and done.stdout.splitlines()[-1].endswith("report/report.html")
    shown = [line.split()[-1] for line in done.stdout.splitlines() if line.rstrip().split()[1:2] == ["s"]]
    assert shown[-1] == "report" and {*titles(steps_in(tmp_path))} - {*shown} <= {"carrier-bf16"}
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/summary.json")]
    assert len(summaries) == len(shown) - 1 and all(one["passed"] for one in summaries)


@pytest.mark.slow
def test_the_demo_end_to_end(tmp_path):
    """Every experiment on the bundled demo, from nothing: what each one is for holds there on any machine."""
    done = command("experiments.study", "--limit", 3, "--jobs", 2, "--quiet", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")}
    assert {title.split("-")[0] for title in found} >= set(ORDER) - {"carrier"}, "carrier runs where a row diverges"
    assert all(one["passed"] for one in found.values())
    assert found["fixed_prefix-bf16-fp32"]["cross_precision"]["prefix_identity"]["count"] == 3
    assert found["bridge-bf16"]["identity"]["all"]["count"] == 3
    recovery = found["transplant-bf16"]["endpoints"]["bidirectional_donor_recovery"]
    assert recovery["count"] == recovery["n"]
    assert found["replication-bf16"]["interpretation"] and found["batch_control-bf16"]["rows"] == 3
