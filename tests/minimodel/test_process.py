"""MKL's vector functions are called first on one thread; a fresh process's tables are every process's tables.

The fault itself (`numerics.settle_vector_math`) is a race that a test cannot order, so the quick tests hold what rules
it out: each function's first call is on one element, so on one thread. The slow one starts many processes and counts.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

MKL = {"acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan"}
MKL |= {"tanh", "trunc"}  # what aten/src/ATen/cpu/vml.h of torch 2.13 hands to MKL

FIRST_CALLS = """
import json, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
import minimodel.numerics as numerics
from cache import build_live, build_prefill
from decode import Contract, State
from minimodel import NumericContract, load_model
from tests.tiny import TASK

directory, kernels, dtype, settle = sys.argv[1:]
if settle == "no":
    numerics.settle_vector_math = lambda: None
first = {}

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and tensor.dtype in (torch.float32, torch.float64):
            name = function.__name__.split(".")[0].strip("_")
            first.setdefault(f"{name} {tensor.dtype}", tensor.numel())
        return function(*args, **(kwargs or {}))

with Calls():
    model = load_model(directory, NumericContract(dtype=dtype, kernels=kernels, threads=1), copies=1)
    prompt = State.prompt(Contract.load(directory), TASK["question"], TASK["choices"])
    build_prefill(model, build_live(model, prompt).state)
    model.rotary.at(torch.tensor([[4095]]), 4096)
print(json.dumps(first))
"""

TABLE = """
import hashlib, sys, torch
from minimodel import NumericContract
from minimodel.layers import rotary_table
NumericContract("bf16", threads=8).apply()  # more threads than cores: the likeliest way to meet the race
cos, sin = rotary_table(4096, 64, 1e6, torch.float32)
if sys.argv[1] == "flip":
    sin.view(torch.int32)[4095, 63] ^= 1
print(hashlib.sha256(cos.numpy().tobytes() + sin.numpy().tobytes()).hexdigest())
"""


def fresh(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def first_calls(directory: Path, kernels: str, dtype: str, settle: str) -> dict[str, int]:
    """Elements of the first call of each MKL function on each wide dtype in a fresh process: loading and two builds."""
    found = json.loads(fresh(FIRST_CALLS, str(directory), kernels, dtype, settle))
    return {name: numel for name, numel in found.items() if name.split()[0] in MKL}


@pytest.mark.parametrize(("kernels", "dtype"), [("invariant", "fp32"), ("repeat_kv", "fp64")])
def test_every_first_call_is_on_one_element(tiny_directory, kernels, dtype):
    settled = first_calls(tiny_directory, kernels, dtype, "yes")
    assert len(settled) == 6, settled  # cos, sin, exp at FP32 and FP64: no pass calls another MKL function
    assert set(settled.values()) == {1}, settled


def test_without_settling_the_table_itself_is_the_first_call(tiny_directory):
    loose = first_calls(tiny_directory, "repeat_kv", "bf16", "no")
    assert loose["cos torch.float32"] == loose["sin torch.float32"] > 4096, loose


@pytest.mark.slow
def test_a_hundred_fresh_processes_make_one_table():
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fresh(TABLE, "as it is"), range(100)))
    assert len(found) == 1
    assert fresh(TABLE, "flip") not in found
