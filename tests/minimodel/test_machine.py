"""The record of the machine: what it reads, what moves it, and the threads that a parallel region really gets."""

import os
import subprocess
import sys

import pytest
import torch

from minimodel import machine, numerics
from minimodel.machine import machine_record, parallel_threads, variables
from tests.conftest import numeric
from tests.helpers import refused

NAMED = {"torch", "cpu", "cpu_features", "cpu_caches", "cpu_capability", "mkl", "onednn", "openmp", "libc"}
NAMED |= {"accelerator"}
MOVING = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE")
MOVING += ("DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "NVIDIA_TF32_OVERRIDE")
MOVING += ("CUBLAS_WORKSPACE_CONFIG", "GLIBC_TUNABLES")
REGION = """
import torch
from minimodel.machine import parallel_threads
for count in (1, 2, 3, 2):
    torch.set_num_threads(count)
    print(parallel_threads())
"""


def test_the_record_is_flat_text_and_names_what_moves_bits():
    found = machine_record()
    assert set(found) >= NAMED and all(isinstance(value, str) and value for value in found.values())
    assert found["torch"] == torch.__version__, "the version with its build, which package metadata leaves out"
    assert found == machine_record()


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch.cpu.get_capabilities came after 2.10")
def test_features_are_those_that_torch_reports():
    found = set(machine_record()["cpu_features"].split())
    reported = torch.cpu.get_capabilities()
    assert found == {name for name, has in reported.items() if has is True} and found
    for name in ("amx_bf16", "avx512_bf16"):
        assert (name in found) == bool(reported[name])


@pytest.mark.parametrize("name", MOVING)
def test_each_variable_that_can_move_bits_is_recorded(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = machine_record()
    monkeypatch.setenv(name, "1")
    assert name not in before and machine_record() == {**before, name: "1"}


def test_variables_that_move_no_bits_are_not(monkeypatch):
    before = variables()
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_VERBOSE", "ONEDNN_VERBOSE", "HOME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert variables() == before


def test_a_region_gets_the_threads_that_were_set_unless_openmp_limits_them(fresh_threads):
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        assert parallel_threads() == count
    if machine_record()["openmp_loaded"] == "unknown":
        pytest.skip("no OpenMP library that can be called here")
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    done = subprocess.run([sys.executable, "-c", REGION], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "2", "2", "2"]


def test_fewer_threads_than_set_are_refused_with_their_cause(monkeypatch, fresh_threads):
    numeric("bf16", threads=2).apply()
    assert parallel_threads() == 2
    monkeypatch.setattr(numerics, "parallel_threads", lambda: 1)
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    with refused("threads: expected 2", "found 1 under", "OMP_THREAD_LIMIT=1", "--threads 1"):
        numeric("bf16", threads=2).apply()
    numeric("bf16", threads=1).apply()


def test_without_openmp_torchs_own_count_stands(monkeypatch):
    monkeypatch.setattr(machine, "_torch_library", object)
    assert parallel_threads() == torch.get_num_threads()


def test_the_cpu_is_named_with_its_model(tmp_path, monkeypatch):
    text = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: A CPU\nstepping\t: 8\n"
    (tmp_path / "cpuinfo").write_text(text + text.replace("143", "144"))
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.cpu_model() == "A CPU (family 6, model 143, stepping 8)"


def test_the_openmp_libraries_are_named_and_no_other_file(tmp_path, monkeypatch):
    """The control: scipy's modules named _decomp, which are mapped once a statistic was computed."""
    places = (
        "/a/lib/libgomp-a34b3233.so.1",
        "/b/scipy/linalg/_decomp_lu_cython.cpython-311-x86_64-linux-gnu.so",
        "[heap]",
    )
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 42   {at}\n" for at in places * 2))
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine_record()["openmp_loaded"] == "libgomp-a34b3233.so.1"
