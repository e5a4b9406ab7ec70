"""The numeric contract: everything that may change a bit, chosen explicitly, put in force, and recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from minimodel.attention import ATTENTION_KERNELS
from minimodel.errors import InputError, refuse
from minimodel.linear import LINEAR_KERNELS
from minimodel.machine import parallel_threads, variables

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
KERNELS = {  # short form: (attention kernel, linear kernel)
    "repeat_kv": ("repeat_kv", "plain"),
    "packed_gqa": ("packed_gqa", "plain"),
    "invariant": ("blocked", "tiled"),
}
DEFAULT_THREADS = 2
SDPA_KERNELS = ("flash", "mem_efficient", "math", "cudnn")  # SDPA chooses among these; all on is torch's default
SETTLED = ("cos", "sin", "exp")  # the MKL vector functions that a decoder pass calls
Settings = dict[str, Any]  # of the process, under the names that a manifest records
# name in a manifest: attribute of torch.backends, its value in BF16 and FP16, its value in FP32 and FP64. They are set
# in this order: torch's old spelling (allow_tf32) before its new one (fp32_precision), of which it also sets a part.
# Each has been observed changed by a caller. The paper's surface has cuDNN's TF32 on in BF16; no cuDNN operation runs.
BACKENDS: dict[str, tuple[str, Any, Any]] = {
    "cuda_matmul_allow_tf32": ("cuda.matmul.allow_tf32", False, False),
    "cudnn_allow_tf32": ("cudnn.allow_tf32", True, False),
    # "bf16" makes CPU FP32 products round their operands to BF16
    "mkldnn_matmul_fp32_precision": ("mkldnn.matmul.fp32_precision", "ieee", "ieee"),
    "cuda_matmul_fp32_precision": ("cuda.matmul.fp32_precision", "ieee", "ieee"),
    "cudnn_conv_fp32_precision": ("cudnn.conv.fp32_precision", "tf32", "ieee"),
    "cudnn_rnn_fp32_precision": ("cudnn.rnn.fp32_precision", "tf32", "ieee"),
    # these two hold in every dtype: `NumericContract.reduced_precision` is their value
    "bf16_reduced_precision_reduction": ("cuda.matmul.allow_bf16_reduced_precision_reduction", None, None),
    "fp16_reduced_precision_reduction": ("cuda.matmul.allow_fp16_reduced_precision_reduction", None, None),
    "fp16_accumulation": ("cuda.matmul.allow_fp16_accumulation", False, False),
    "mkldnn": ("mkldnn.enabled", True, True),
}


@dataclass(frozen=True, init=False)
class NumericContract:
    """Everything chosen that may change a bit. `dataclasses.replace` takes every argument of the constructor."""

    dtype: str  # bf16, fp16, fp32 or fp64
    device: str  # cpu, cuda or cuda:N; several of one kind, 'cuda:0,cuda:1', hold the layers in order (`placement`)
    kernels: str  # both kernels' names in short form where `KERNELS` has one, else as ATTENTION/LINEAR
    threads: int  # of the CPU
    reduced_precision: bool  # CUDA may reduce split BF16 and FP16 sums in that dtype: torch's default, and the paper's

    def __init__(
        self,
        dtype: str,
        device: str = "cpu",
        kernels: str = "repeat_kv",
        attention: str = "",
        linear: str = "",
        threads: int = DEFAULT_THREADS,
        reduced_precision: bool = True,
    ) -> None:
        """`attention` and `linear` override their half of `kernels`. InputError for a name that does not exist."""
        if type(threads) is not int or not 1 <= threads <= 1024:
            raise refuse("threads", "an integer from 1 to 1024", threads)
        if not isinstance(kernels, str) or (kernels not in KERNELS and "/" not in kernels):
            raise refuse("kernels", f"{' or '.join(KERNELS)} or ATTENTION/LINEAR", kernels)
        if type(reduced_precision) is not bool:
            raise refuse("reduced_precision", "True or False", reduced_precision)
        pair = attention or _pair(kernels)[0], linear or _pair(kernels)[1]
        for what, name, known in (
            ("dtype", dtype, list(DTYPES)),
            ("attention kernel", pair[0], list(ATTENTION_KERNELS)),
            ("linear kernel", pair[1], list(LINEAR_KERNELS)),
        ):
            if name not in known:
                raise refuse(what, " or ".join(known), name)
        _check_device(device)
        short = next((name for name, parts in KERNELS.items() if parts == pair), "/".join(pair))
        # a frozen dataclass refuses `self.dtype = dtype`
        vars(self).update(
            dtype=dtype, device=device, kernels=short, threads=threads, reduced_precision=reduced_precision
        )

    @property
    def attention(self) -> str:
        """The attention kernel's name, of `minimodel.attention.ATTENTION_KERNELS`."""
        return _pair(self.kernels)[0]

    @property
    def linear(self) -> str:
        """The linear kernel's name, of `minimodel.linear.LINEAR_KERNELS`."""
        return _pair(self.kernels)[1]

    @property
    def invariant(self) -> bool:
        """Whether both kernels claim batch invariance."""
        return self.kernels == "invariant"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, activations, K/V and logits."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """Where inputs, masks and logits lie: the first device."""
        return torch.device(self.device.split(",")[0])

    @property
    def settings(self) -> Settings:
        """The settings of the process under this contract. Everything not listed follows from the torch version."""
        narrow = self.dtype in ("bf16", "fp16")
        return {
            "threads": self.threads,
            "float32_matmul_precision": "highest",
            **{name: low if narrow else high for name, (_, low, high) in BACKENDS.items()},
            "bf16_reduced_precision_reduction": self.reduced_precision,
            "fp16_reduced_precision_reduction": self.reduced_precision,
            "sdpa_kernels": " ".join(SDPA_KERNELS),
            "autocast": False,
            "deterministic_algorithms": False,  # torch's default, and the paper's
        }

    def apply(self) -> None:
        """Puts the settings in force, and two that no record shows: denormals kept, MKL's functions settled.

        InputError where a parallel region gets another number of threads than set: the record would be wrong.
        """
        torch.set_num_threads(self.threads)
        _require_threads(self.threads)
        torch.set_float32_matmul_precision("highest")
        for name, (path, _, _) in BACKENDS.items():
            owner, _, attribute = path.rpartition(".")
            setattr(attrgetter(owner)(torch.backends), attribute, self.settings[name])
        for kernel in SDPA_KERNELS:
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)  # only then: it imports torch's compiler, as slow as torch itself
        torch.set_flush_denormal(False)
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        settle_vector_math()

    def require_in_force(self) -> None:
        """InputError when something changed a setting since `apply`: the bits would no longer be this contract's."""
        found = in_force()
        for name, expected in self.settings.items():
            if found[name] != expected:
                raise refuse(f"process setting {name}", f"{expected!r} as the numeric contract set it", found[name])

    def record(self) -> dict[str, Any]:
        """Returns what a manifest keeps: the names chosen, and the settings as read back from the process."""
        chosen = {"dtype": self.dtype, "device": self.device, "attention": self.attention, "linear": self.linear}
        return {**chosen, **in_force()}


def in_force() -> Settings:
    """Returns the settings as the process has them now; "mixed" where torch's two spellings of one disagree."""
    on = [kernel for kernel in SDPA_KERNELS if getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()]
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        **{name: _read(partial(attrgetter(path), torch.backends)) for name, (path, _, _) in BACKENDS.items()},
        "sdpa_kernels": " ".join(on),
        "autocast": any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # torch's refusal when the old and the new spelling were mixed
        return "mixed"


def _require_threads(threads: int) -> None:
    """InputError, with what to type, where a parallel region gets another number of threads."""
    found = parallel_threads() if threads > 1 else 1
    if found != threads:
        limits = " ".join(f"{name}={value}" for name, value in variables().items() if name.startswith("OMP_"))
        cause, cure = (f" under {limits}", "unset that, or ") if limits else ("", "")
        raise InputError(
            f"threads: expected {threads} in a parallel region, found {found}{cause}; {cure}pass --threads {found}"
        )


def settle_vector_math() -> None:
    """Makes the process's first call of each MKL vector function that a pass uses on one element, so on one thread.

    MKL 2024 chooses a function's kernel at its first call in a process and does not guard that choice. Where several
    threads make the first call together, one of them can run a low-accuracy kernel over its whole share, some 2,500 ULP
    off, once (pytorch issue 188792): about one process in ten got other bits in a rotary table of 512 rows.
    """
    for dtype in (torch.float32, torch.float64):  # narrower dtypes do not go through MKL
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in SETTLED:
            getattr(torch, function)(one)


def _pair(kernels: str) -> tuple[str, str]:
    """Returns (attention, linear) of a short form, or of ATTENTION/LINEAR."""
    attention, _, linear = kernels.partition("/")
    return KERNELS.get(kernels, (attention, linear))


def _check_device(names: str) -> None:
    """InputError unless `names` lists devices of one kind that are here."""
    if not isinstance(names, str):
        raise refuse("device", "the name cpu, cuda or cuda:N", names)
    kinds = set()
    for name in names.split(","):
        unknown = refuse("device", "cpu, cuda or cuda:N", name)
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise unknown from None
        if device.type not in ("cpu", "cuda"):
            raise unknown
        devices = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= devices:
            expected = f"one of {devices} CUDA devices" if devices else "cpu, for there is no CUDA device"
            raise refuse("device", expected, name)
        kinds.add("cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
    if len(kinds) > 1:  # a kernel of one name has other bits on another kind of device
        raise refuse("devices", "devices of one kind", ", ".join(sorted(kinds)))
