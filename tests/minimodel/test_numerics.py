"""The numeric contract: every setting chosen, put in force whatever the caller did, and missed when it changes.

MKL's vector functions are called first on one thread (`numerics.settle_vector_math`). The fault that this rules out is
a race that a test cannot order, so the test holds that each function's first call is on one element.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minimodel import NumericContract, load_model
from minimodel.bits import same_bits
from minimodel.numerics import in_force
from tests import THREADS
from tests.conftest import numeric
from tests.helpers import random_tensor, refused

BACKENDS = torch.backends
TAMPER = {
    "threads": lambda: torch.set_num_threads(THREADS + 2),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "TF32, old spelling": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "TF32, new spelling": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "BF16 inside CPU products": lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "cuDNN TF32, old spelling": lambda: setattr(BACKENDS.cudnn, "allow_tf32", True),
    "cuDNN TF32, new spelling": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "tf32"),
    "BF16 reductions": lambda: setattr(BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "FP16 reductions": lambda: setattr(BACKENDS.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "FP16 accumulation": lambda: setattr(BACKENDS.cuda.matmul, "allow_fp16_accumulation", True),
    "mkldnn off": lambda: setattr(BACKENDS.mkldnn, "enabled", False),
    "flash attention off": lambda: BACKENDS.cuda.enable_flash_sdp(False),
    "math attention off": lambda: BACKENDS.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
}


@pytest.fixture(autouse=True)
def restore():
    generic = BACKENDS.fp32_precision
    yield
    BACKENDS.fp32_precision = generic
    numeric("bf16").apply()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", TAMPER)
def test_a_changed_setting_is_missed_and_then_put_right(kind, dtype):
    """pytorch/pytorch 88718, 67384 (case 2)."""
    contract = numeric(dtype)
    contract.apply()
    contract.require_in_force()
    before = in_force()
    TAMPER[kind]()
    if in_force() == before:
        assert dtype == "bf16" and "cuDNN" in kind, "only cuDNN's TF32 is already as the change would set it"
        return
    with refused("process setting", "numeric contract"):
        contract.require_in_force()
    contract.apply()
    contract.require_in_force()
    assert in_force() == before


def test_everything_changed_at_once_is_put_right(fresh_threads):
    BACKENDS.fp32_precision = "tf32"
    for change in TAMPER.values():
        change()
    for dtype in ("fp32", "bf16"):
        numeric(dtype).apply()
        numeric(dtype).require_in_force()
    assert list(numeric("bf16").settings) == list(in_force())


def test_fp32_switches_tf32_off_and_bf16_is_the_papers_surface():
    """Paper: BF16 with matmul TF32 off, cuDNN TF32 on, reduced-precision reduction as torch has it."""
    numeric("fp32").apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not BACKENDS.cuda.matmul.allow_tf32 and not BACKENDS.cudnn.allow_tf32
    for options in ({}, {"reduced_precision": True}, {"reduced_precision": False}):
        contract, reduced = numeric("bf16", **options), options.get("reduced_precision", True)
        contract.apply()
        assert not BACKENDS.cuda.matmul.allow_tf32 and BACKENDS.cudnn.allow_tf32
        assert BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction == reduced
        assert contract.record()["bf16_reduced_precision_reduction"] == reduced


def test_bits_survive_a_callers_settings(fresh_threads):
    """The point of all this (case 2): an FP32 product and an attention under tampered settings, and after `apply`."""
    x, w = random_tensor(4, 512), random_tensor(512, 512, seed=1)
    heads = random_tensor(1, 4, 9, 32, dtype=torch.bfloat16)

    def results():
        return F.linear(x, w), F.scaled_dot_product_attention(heads, heads, heads)

    numeric("fp32").apply()
    before = results()
    for kind in ("BF16 inside CPU products", "flash attention off", "threads"):
        TAMPER[kind]()
    changed = results()
    numeric("fp32").apply()
    assert all(map(same_bits, results(), before))
    if BACKENDS.mkldnn.is_available() and "AVX512" in BACKENDS.cpu.get_cpu_capability():
        assert not all(map(same_bits, changed, before)), "nothing here moves a bit"


def test_loading_a_model_puts_its_contract_in_force(tiny_directory, fresh_threads):
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    model = load_model(str(tiny_directory), NumericContract(dtype="fp32", threads=2), copies=1)
    assert torch.get_num_threads() == 2 and torch.get_float32_matmul_precision() == "highest"
    model.numeric.require_in_force()
    with refused("threads", "3", "2"):
        numeric("fp32", threads=3).require_in_force()


def test_record_holds_names_and_settings_as_they_are(fresh_threads):
    """Case 2: what decides a bit is recorded, read from the process and not copied from the contract."""
    contract = numeric("bf16", kernels="packed_gqa", threads=2)
    contract.apply()
    expected = {"dtype": "bf16", "device": "cpu", "attention": "packed_gqa", "linear": "plain", "threads": 2}
    assert {**contract.record(), **expected, "cuda_matmul_allow_tf32": False} == contract.record()
    torch.set_num_threads(1)
    assert contract.record()["threads"] == 1


def test_parts_override_the_short_form_and_a_replaced_contract_has_the_kernels_that_were_named():
    plain = NumericContract("bf16", threads=1)
    assert (plain.attention, plain.linear) == ("repeat_kv", "plain")
    assert numeric("bf16", kernels="packed_gqa").attention == "packed_gqa"
    assert numeric("bf16", kernels="packed_gqa", attention="eager").attention == "eager"
    other = replace(plain, kernels="invariant")
    assert (other.attention, other.linear, other.kernels) == ("blocked", "tiled", "invariant")
    assert replace(other, threads=3) == NumericContract("bf16", kernels="invariant", threads=3)
    eager = replace(other, attention="eager")
    assert (eager.attention, eager.linear, eager.kernels) == ("eager", "tiled", "eager/tiled")
    assert replace(eager, dtype="fp32").kernels == "eager/tiled" and replace(eager, linear="plain").linear == "plain"
    assert replace(eager, attention="blocked") == other, "one pair of names is one contract, however it was spelled"
    assert NumericContract("bf16", kernels="eager/tiled", threads=1) == eager


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"kernels": "flash/plain"}, ("attention kernel", "'flash'")),
        ({"kernels": "eager/"}, ("linear kernel", "''")),
        ({"dtype": "int8"}, ("dtype", "bf16", "'int8'")),
        ({"kernels": "fast"}, ("kernels", "repeat_kv", "'fast'")),
        ({"attention": "flash"}, ("attention kernel", "eager", "'flash'")),
        ({"linear": "fast"}, ("linear kernel", "plain", "'fast'")),
        *(({"threads": count}, ("threads", str(count))) for count in (0, True, 2.0)),
        *(({"device": name}, ("device: expected", f"'{name}'")) for name in ("tpu", "mps", "cuda:99")),
        # several devices: the one that is none is named
        ({"device": "cpu,tpu"}, ("device: expected cpu, cuda or cuda:N, found 'tpu'",)),
        ({"device": "cpu,"}, ("device: expected cpu, cuda or cuda:N, found ''",)),
        ({"device": "cpu,meta"}, ("device: expected cpu, cuda or cuda:N, found 'meta'",)),
        # of another type, as a caller from torch may give them
        *(({"device": given}, ("device: expected the name", str(given))) for given in (None, 0, torch.device("cpu"))),
        ({"kernels": ["eager"]}, ("kernels: expected", "['eager']")),
        *(({"reduced_precision": given}, ("reduced_precision: expected True or False",)) for given in ("no", None, 1)),
    ],
)
def test_unknown_choices_are_refused_by_name(options, parts):
    with refused(*parts):
        NumericContract(**{"dtype": "bf16", **options})


MKL = {"acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan"}
MKL |= {"tanh", "trunc"}  # what aten/src/ATen/cpu/vml.h of torch 2.13 hands to MKL

FIRST_CALLS = """
import json, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from minimodel import NumericContract, load_model, numerics, selfcheck

selfcheck.invariance_fault = lambda numeric, config: ""  # long, and no call that a pass does not make
directory, *models = sys.argv[1:]
if models[0] == "unsettled":
    del models[0]
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
    for kernels, dtype in (name.split("-") for name in models):
        model = load_model(directory, NumericContract(dtype=dtype, kernels=kernels, threads=1), copies=1)
        for length in (40, 1):
            ids = torch.arange(length)[None]
            model.logits(model(ids, ids % 6, ids, None))
        model.rotary_emb(torch.tensor([[4095]]), 4096)
print(json.dumps(first))
"""


def first_calls(*arguments):
    """Elements of the first call of each MKL function on each wide dtype in a fresh process: a load and two passes."""
    command = [sys.executable, "-c", FIRST_CALLS, *arguments]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {name: numel for name, numel in found.items() if name.split()[0] in MKL}


def test_every_first_call_is_on_one_element(tiny_directory):
    settled = first_calls(str(tiny_directory), "invariant-fp32", "repeat_kv-fp64")
    assert len(settled) == 6, settled  # cos, sin, exp at FP32 and FP64: no pass calls another MKL function
    assert set(settled.values()) == {1}, settled
    loose = first_calls(str(tiny_directory), "unsettled", "repeat_kv-bf16")
    assert loose["cos torch.float32"] == loose["sin torch.float32"] > 4096, "the control: the table is the first call"
