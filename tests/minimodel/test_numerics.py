"""The numeric contract: every setting chosen, put in force whatever the caller did, and missed when it changes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minimodel import NumericContract, load_model
from minimodel.bits import same_bits
from minimodel.numerics import DTYPES, in_force, wanted
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
        assert dtype == "bf16" and "cuDNN" in kind, "only cuDNN's TF32 is already as the tamperer wants it"
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


def test_wanted_and_in_force_name_the_same_settings():
    assert set(wanted(1, False, True)) == set(in_force())


def test_fp32_switches_tf32_off_and_bf16_is_the_papers_surface():
    """Paper, numerical contract: BF16 with matmul TF32 off and cuDNN TF32 on."""
    numeric("fp32").apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not BACKENDS.cuda.matmul.allow_tf32 and not BACKENDS.cudnn.allow_tf32
    numeric("bf16").apply()
    assert not BACKENDS.cuda.matmul.allow_tf32 and BACKENDS.cudnn.allow_tf32


def test_reduced_precision_is_torchs_default_and_can_be_switched_off():
    """Paper: the BF16 surface leaves reduced-precision reduction as torch has it."""
    for chosen in (True, False):
        contract = numeric("bf16", reduced_precision=chosen)
        contract.apply()
        assert BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction == chosen
        assert contract.record()["bf16_reduced_precision_reduction"] == chosen
    assert numeric("bf16").reduced_precision


def test_bits_survive_a_callers_settings(fresh_threads):
    """The point of all this: an FP32 product and an attention under tampered settings, and after `apply`."""
    x, w = random_tensor(4, 512), random_tensor(512, 512, seed=1)
    heads = random_tensor(1, 4, 9, 32, dtype=torch.bfloat16)

    def results():
        return F.linear(x, w), F.scaled_dot_product_attention(heads, heads, heads)

    numeric("fp32").apply()
    linear, attention = results()
    TAMPER["BF16 inside CPU products"]()
    TAMPER["flash attention off"]()
    TAMPER["threads"]()
    changed = results()
    numeric("fp32").apply()
    again = results()
    assert same_bits(again[0], linear) and same_bits(again[1], attention)
    if BACKENDS.mkldnn.is_available() and "AVX512" in BACKENDS.cpu.get_cpu_capability():
        assert not (same_bits(changed[0], linear) and same_bits(changed[1], attention)), "nothing here moves a bit"


def test_loading_a_model_puts_its_contract_in_force(tiny_directory, fresh_threads):
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    model = load_model(str(tiny_directory), NumericContract(dtype="fp32", threads=2), copies=1)
    assert torch.get_num_threads() == 2 and torch.get_float32_matmul_precision() == "highest"
    model.numeric.require_in_force()
    with refused("threads", "3", "2"):
        numeric("fp32", threads=3).require_in_force()


def test_record_holds_names_and_settings_as_they_are(fresh_threads):
    contract = numeric("bf16", kernels="packed_gqa", threads=2)
    contract.apply()
    record = contract.record()
    assert record | {"dtype": "bf16", "device": "cpu", "attention": "packed_gqa", "linear": "plain"} == record
    assert record["threads"] == 2 and record["cuda_matmul_allow_tf32"] is False
    torch.set_num_threads(1)
    assert contract.record()["threads"] == 1, "a record is read from the process, not copied from the wish"


def test_parts_override_the_short_form():
    assert (numeric("bf16").attention, numeric("bf16").linear) == ("repeat_kv", "plain")
    assert numeric("bf16", kernels="packed_gqa").attention == "packed_gqa"
    assert numeric("bf16", kernels="packed_gqa", attention="eager").attention == "eager"


def test_a_replaced_contract_has_the_kernels_that_were_asked_for():
    plain = NumericContract("bf16", threads=1)
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
        ({"threads": 0}, ("threads", "0")),
        ({"threads": True}, ("threads", "True")),
        ({"threads": 2.0}, ("threads", "2.0")),
        ({"device": "tpu"}, ("device", "'tpu'")),
        ({"device": "mps"}, ("device", "'mps'")),
        ({"device": "cuda:99"}, ("device", "'cuda:99'")),
    ],
)
def test_unknown_choices_are_refused_by_name(options, parts):
    with refused(*parts):
        NumericContract(**{"dtype": "bf16", **options})


def test_dtypes_are_the_four():
    assert {name: NumericContract(name).torch_dtype for name in DTYPES} == {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
