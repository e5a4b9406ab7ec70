"""How commands end: closed pipes, interruptions at any time, memory that is not there, text for a terminal; and how a
command whose copies differ starts again in MKL's reproducible mode, once, which its manifest says."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.run import exits
from experiments.run.exits import run_command, say
from tests.experiments.commands import ROOT, command, environment, python, start, write_tasks
from tests.experiments.runs import manifest_of
from tests.faults.forked import in_child, limit_memory, one_error
from tests.helpers import wait_until


@pytest.mark.parametrize("redirect", ["2>&1 >/dev/full | true", ">/dev/full"])
def test_a_full_output_is_one_error(tmp_path, redirect):
    line = f"{sys.executable} -m experiments.plan {redirect}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    error = "" if "2>&1" in redirect else "error: file: No space left on device\n"  # the reader of stderr has gone
    assert (done.returncode, done.stderr) == (2, error)


def test_a_pipe_closed_at_the_first_line_ends_with_its_own_code(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)

    def body(closed):
        if closed:
            os.dup2(writer, 1)
        run_command(lambda: say("a line") or 0, "experiments.x")

    ended = in_child(lambda: body(True), tmp_path)
    os.close(writer)
    assert ended.code == 141 and ended.stderr == ""
    assert in_child(lambda: body(False), tmp_path).code == 0


@pytest.mark.parametrize("library", ["libtorch", "tokenizers"])
def test_an_interruption_while_a_command_imports_is_one_line(tmp_path, library):
    """Importing takes seconds; wherever the signal falls, at torch's library or after it, no traceback comes out."""
    process = start("experiments.matrix", "--dtype", "bf16", "--limit", 1, "--out", "run", cwd=tmp_path)
    wait_until(lambda: library in Path(f"/proc/{process.pid}/maps").read_text(), lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130 and err.splitlines()[0].endswith("interrupted"), err
    assert "Traceback" not in err and out == ""


def test_a_program_that_imports_the_package_keeps_its_own_interruption():
    script = "import signal; import experiments; print(signal.getsignal(2) is signal.default_int_handler)"
    assert python("-c", script).stdout == "True\n"


def test_weights_beyond_the_address_space_are_one_line(small, tmp_path):
    mine = small.copy(tmp_path)
    weights = mine.checkpoint / "model.safetensors"
    limited = partial(limit_memory, 512 << 20)
    assert mine.run(tmp_path / "run", before=limited).code == 0, "the control: small weights fit under the limit"
    length = weights.stat().st_size
    os.truncate(weights, length + (1 << 31))
    ended = mine.run(tmp_path / "other", before=limited)
    one_error(ended, "model.safetensors")


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")])
def test_an_allocation_that_fails_anywhere_is_one_line(tmp_path, fault):
    def body():
        raise fault

    one_error(in_child(lambda: run_command(body, "experiments.x"), tmp_path), "memory")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert exits.is_allocation(caught.value), "torch's own error"
    assert not exits.is_allocation(RuntimeError("shape mismatch"))


def test_terminal_controls_and_half_characters_are_shown_as_escapes(capsys):
    say("row \x1b[2J\udce9\u202e é\nnext")
    assert capsys.readouterr().out == "row \\x1b[2J\\udce9\\u202e é\nnext\n"


def test_a_path_that_is_not_utf8_is_shown_with_its_escape(small, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    out = tmp_path / name
    ended = small.run(out, "--limit", 2)
    assert ended.code == 0 and "caf\\udce9" in ended.stdout, ended
    from experiments.report.__main__ import main as report

    page = in_child(lambda: report(args=[str(out), "--out", str(tmp_path / "page")]) or 0, tmp_path)
    assert page.code == 0 and "Traceback" not in page.stderr, page
    assert "caf" in (tmp_path / "page" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_command_can_print_a_path_that_is_not_utf8(tmp_path, encoding):
    """Also where it does not go through `say`: a line of text is not worth a traceback."""

    def body():
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        run_command(lambda: print(os.fsdecode(b"caf\xe9")) or 0, "experiments.x")

    ended = in_child(body, tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "caf\\udce9\n", "")


def test_a_module_of_the_users_that_hides_a_package_is_named(tmp_path):
    """A folder without __init__.py hides nothing; a file stats.py or a package cache does, unless Python has -P."""

    def call(*more):
        return python(*more, "-m", "experiments", cwd=tmp_path)

    for name in ("cache", "decode", "minimodel"):
        (tmp_path / name).mkdir()
    assert call().returncode == 0
    (tmp_path / "stats.py").write_text("mean = 1\n")
    done, place = call(), tmp_path / "stats.py"
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"package stats: expected {ROOT / 'stats'}, found {place}; start Python with -P" in done.stderr
    assert call("-P").returncode == 0


# Python imports this at its start: a kernel that spoils the second copy unless MKL's reproducible mode is chosen
BROKEN = """
import os
import torch
import minimodel.attention as attention

kernel = attention.ATTENTION_KERNELS["repeat_kv"]

def attend(query, *rest):
    out = kernel(query, *rest).clone()
    if len(out) > 1 and {condition}:
        out[1] += 1
    return out

attention.ATTENTION_KERNELS["repeat_kv"] = attend
"""


def spoiled(root, checkpoint, condition):
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    (root / "sitecustomize.py").write_text(BROKEN.format(condition=condition))
    write_tasks(root / "tasks.jsonl", 1)
    arguments = ["--dtype", "bf16", "--threads", "2", "--checkpoint", checkpoint, "--tasks", "tasks.jsonl", "--quiet"]
    path = f"{root}:{ROOT}"
    return command("experiments.matrix", *arguments, "--out", "run", cwd=root, PYTHONPATH=path)


SEVERAL = "torch.get_num_threads() > 1"


def test_it_starts_again_once_and_the_manifest_says_so(tmp_path, tiny_directory):
    done = spoiled(tmp_path, tiny_directory, f"{SEVERAL} and 'MKL_CBWR' not in os.environ")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting again with MKL_CBWR=AUTO: two equal copies") == 1
    assert manifest_of(tmp_path / "run")["environment"]["MKL_CBWR"] == "AUTO"


def test_where_it_does_not_help_one_line_names_what_works(tmp_path, tiny_directory):
    """After one second start. Where none is offered: tests/minimodel/test_selfcheck.py."""
    done = spoiled(tmp_path, tiny_directory, SEVERAL)
    again, line = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    assert "starting again with MKL_CBWR=AUTO" in again
    assert line.startswith("error: two equal copies get different bits at self_attn.attention")
    assert line.endswith("pass --threads 1 (other bits)")
