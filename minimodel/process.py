"""Process-wide settings of torch that move bits: put in force, and read back.

Each has been observed changed by a caller: TF32 and BF16 shortcuts inside FP32 products (in both of torch's spellings,
old and new), a switched-off SDPA kernel, autocast, another thread count.
"""

from collections.abc import Callable
from typing import Any

import torch

from minimodel.errors import InputError
from minimodel.machine import parallel_threads, variables

Settings = dict[str, Any]
SETTLED = ("cos", "sin", "exp")  # the MKL vector functions that a decoder pass calls


def wanted(threads: int, cudnn_tf32: bool, reduced_precision: bool) -> Settings:
    """The settings of a run, under the names that a manifest records. Everything not listed follows from torch."""
    cudnn = "tf32" if cudnn_tf32 else "ieee"
    return {
        "threads": threads,
        "float32_matmul_precision": "highest",
        "cuda_matmul_allow_tf32": False,
        "cudnn_allow_tf32": cudnn_tf32,
        "mkldnn_matmul_fp32_precision": "ieee",  # "bf16" makes CPU FP32 products round their operands to BF16
        "cuda_matmul_fp32_precision": "ieee",
        "cudnn_conv_fp32_precision": cudnn,
        "cudnn_rnn_fp32_precision": cudnn,
        "bf16_reduced_precision_reduction": reduced_precision,
        "fp16_reduced_precision_reduction": reduced_precision,
        "fp16_accumulation": False,
        "mkldnn": True,
        "sdpa_kernels": "flash mem_efficient math cudnn",  # torch's own default; SDPA chooses among these
        "autocast": False,
        "deterministic_algorithms": False,  # torch's default, and the paper's
    }


def put_in_force(threads: int, cudnn_tf32: bool, reduced_precision: bool) -> None:
    """Sets what `wanted` lists, whatever the caller had set, through both of torch's spellings.

    InputError where the process does not get that many threads.
    """
    backends: Any = torch.backends  # its stubs lack the new spelling
    cudnn = "tf32" if cudnn_tf32 else "ieee"
    torch.set_num_threads(threads)
    _require_threads(threads)
    # the old spelling sets the new one of the matrix products too; of cuDNN's it sets only a part
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.allow_tf32 = False
    backends.cudnn.allow_tf32 = cudnn_tf32
    backends.mkldnn.matmul.fp32_precision = backends.cuda.matmul.fp32_precision = "ieee"
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = cudnn
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced_precision
    backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced_precision
    backends.cuda.matmul.allow_fp16_accumulation = False
    backends.mkldnn.enabled = True
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(backends.cuda, f"enable_{kernel}_sdp")(True)
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)  # torch has no getter for it
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    settle_vector_math()


def _require_threads(threads: int) -> None:
    """InputError where a parallel region gets another number of threads than was set: the record would be wrong."""
    found = parallel_threads() if threads > 1 else 1
    if found != threads:
        limits = [f"{name}={value}" for name, value in variables().items() if name.startswith("OMP_")]
        cause = f" under {' '.join(limits)}" if limits else ""
        raise InputError(
            f"threads: expected {threads} in a parallel region, found {found}{cause}; "
            f"{'unset that, or ' if limits else ''}pass --threads {found}"
        )


def settle_vector_math() -> None:
    """Makes the process's first call of each MKL vector function we use on one element, so on one thread.

    MKL 2024 chooses a function's kernel at its first call in a process and does not guard that choice: where several
    threads make the first call together, one of them can run a low-accuracy kernel over its whole share, some 2,500 ULP
    off, once (pytorch issue 188792). A rotary table of 512 rows was so given other bits in about one process in ten.
    """
    for dtype in (torch.float32, torch.float64):  # narrower dtypes do not go through MKL
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in SETTLED:
            getattr(torch, function)(one)


def in_force() -> Settings:
    """The same settings as the process has them now. "mixed": torch refuses to say, its two spellings disagree."""
    backends: Any = torch.backends
    kernels = [k for k in ("flash", "mem_efficient", "math", "cudnn") if getattr(backends.cuda, f"{k}_sdp_enabled")()]
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "cuda_matmul_allow_tf32": _read(lambda: backends.cuda.matmul.allow_tf32),
        "cudnn_allow_tf32": _read(lambda: backends.cudnn.allow_tf32),
        "mkldnn_matmul_fp32_precision": backends.mkldnn.matmul.fp32_precision,
        "cuda_matmul_fp32_precision": backends.cuda.matmul.fp32_precision,
        "cudnn_conv_fp32_precision": backends.cudnn.conv.fp32_precision,
        "cudnn_rnn_fp32_precision": backends.cudnn.rnn.fp32_precision,
        "bf16_reduced_precision_reduction": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "fp16_accumulation": backends.cuda.matmul.allow_fp16_accumulation,
        "mkldnn": backends.mkldnn.enabled,
        "sdpa_kernels": " ".join(kernels),
        "autocast": any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # torch's refusal when the old and the new spelling were mixed
        return "mixed"
