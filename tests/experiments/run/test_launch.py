"""The real launcher: torchrun, and `experiments.launch`, which ends with the ranks' own exit code."""

import os
import signal
import subprocess
import sys

import pytest

from tests.experiments.commands import command, environment
from tests.experiments.run.jobs import require_same
from tests.experiments.runs import manifest_of
from tests.helpers import wait_until

LAUNCH, TORCHRUN = "experiments.launch", "torch.distributed.run"


def launched(launcher, size, *arguments, cwd):
    """`python -m LAUNCHER --nproc-per-node SIZE ARGUMENTS`, with torchrun's own default of OMP_NUM_THREADS."""
    env = environment()
    env.pop("OMP_NUM_THREADS", None)
    words = [sys.executable, "-m", launcher, "--nproc-per-node", str(size), *map(str, arguments)]
    return subprocess.Popen(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    """The exit code, stdout and stderr of a launcher that ends by itself."""
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout, stderr


def test_torchrun_writes_the_bytes_of_one_process_and_leaves_the_thread_count_alone(small, tmp_path):
    """Two threads per rank, as given, though the launcher sets OMP_NUM_THREADS to one."""
    alone = command("experiments.matrix", *small.arguments(tmp_path / "alone", threads=2), cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    matrix = ["-m", "experiments.matrix", *small.arguments(tmp_path / "run", threads=2)]
    code, stdout, stderr = ended(launched(TORCHRUN, 2, *matrix, cwd=tmp_path))
    assert code == 0, stderr
    assert "Setting OMP_NUM_THREADS" in stderr, "the control: the launcher did set it"
    assert stdout.splitlines()[-1] == f"run: {tmp_path / 'run'}" and stdout.count("gates all passed") == 1
    require_same(tmp_path / "run", tmp_path / "alone")
    assert manifest_of(tmp_path / "run")["numeric"][0]["threads"] == 2


FAULTY = """
import os
import experiments.matrix as m
import experiments.run.experiment as experiment
if os.environ["RANK"] == "1":
    experiment.replica_exact = lambda left, right: False
m.main()
"""
STOPPING = """
import os, signal
import experiments.matrix as m
from experiments.run.progress import Progress
real, left = Progress.row, iter(range({rows}))
def row(self, name):
    if {condition} and next(left, None) is None:
        {act}
    return real(self, name)
Progress.row = row
m.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "code"), [(LAUNCH, 3), (TORCHRUN, 1)])
def test_the_exit_code_is_the_ranks_own_where_torchrun_has_it_in_its_table(small, tmp_path, launcher, code):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    arguments = [script, *small.arguments(tmp_path / "run", "--preflight", 0)]
    found, stdout, stderr = ended(launched(launcher, 2, *arguments, cwd=tmp_path))
    assert found == code, stderr
    assert "gates FAILED on 4 rows" in stdout
    assert "Traceback" not in stderr if code == 3 else "exitcode  : 3" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_rank_killed_or_a_job_interrupted_goes_on_with_other_ranks(small, tmp_path, number):
    """SIGKILL for one rank, SIGINT for the launcher; then two ranks for three."""
    assert small.run(tmp_path / "alone").code == 0
    script, arguments = tmp_path / "waiting.py", [*small.arguments(tmp_path / "run"), "--preflight", 0]
    act = """open(f"waiting-{os.environ['RANK']}", "w").write(str(os.getpid())); signal.pause()"""
    script.write_text(STOPPING.format(rows=1, condition=True, act=act))
    process = launched(LAUNCH, 3, script, *arguments, cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 3, lambda: process.poll() is None)
    os.kill(int((tmp_path / "waiting-1").read_text()) if number == signal.SIGKILL else process.pid, number)
    code, _, stderr = ended(process)
    assert code == (137 if number == signal.SIGKILL else 130), stderr
    assert stderr.count("resume with: torchrun --nproc-per-node 3 -m experiments.matrix --dtype bf16") == 1
    assert ("rank 1 was ended by SIGKILL" in stderr) == (number == signal.SIGKILL) and "Traceback" not in stderr
    code, _, stderr = ended(launched(LAUNCH, 2, "-m", "experiments.matrix", *arguments, cwd=tmp_path))
    assert code == 0 and "3 rows are already there and kept" in stderr, stderr
    require_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_restarted_by_torchrun_goes_on_where_it_stopped(small, tmp_path, restarts):
    assert small.run(tmp_path / "alone").code == 0
    script = tmp_path / "dying.py"
    condition = """os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0\""""
    script.write_text(STOPPING.format(rows=2, condition=condition, act="os.kill(os.getpid(), signal.SIGKILL)"))
    arguments = ["--max-restarts", restarts, script, *small.arguments(tmp_path / "run"), "--preflight", 0]
    code, _, stderr = ended(launched(TORCHRUN, 2, *arguments, cwd=tmp_path))
    if restarts == 0:
        assert code == 1, "the control: without a restart the job ends"
        return
    assert code == 0 and "rows are already there and kept" in stderr, stderr
    require_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_the_resuming_command_keeps_the_launchers_options(small, tmp_path):
    arguments = ["--max-restarts=0", "-m", "experiments.matrix", *small.arguments(tmp_path / "run", "--fresh")]
    process = launched(LAUNCH, 2, *arguments, cwd=tmp_path)
    wait_until((tmp_path / "run/manifest.json").exists, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    code, _, stderr = ended(process)
    assert code == 130, stderr
    start = "python -m experiments.launch --nproc-per-node 2 --max-restarts=0 -m experiments.matrix --dtype"
    assert f"resume with: {start}" in stderr and "--fresh" not in stderr
