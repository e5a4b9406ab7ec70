"""The record of the machine: everything beside the numeric contract that can move a bit, as this process has it.

Manifests, boundary files, traces and recordings carry it under `environment`; a resume compares it field by field.
"""

import ctypes
import os
import platform
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch

PROC = Path("/proc")
LIBRARIES = ("safetensors", "tokenizers", "numpy", "scipy", "click")
BUILDS = {"mkl": "Math Kernel Library", "onednn": "MKL-DNN", "openmp": "OpenMP"}  # as torch.__config__ names them
CPU_PARTS = {"family": "cpu family", "model": "model", "stepping": "stepping"}
CUDA_PARTS = ("nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cudnn")  # wheels whose versions are recorded

# Environment variables that can move bits, found in the documents of torch, oneDNN, MKL, OpenMP, cuBLAS and glibc and
# among the names that libtorch_cpu.so and libgomp.so hold. OMP_NUM_THREADS is not among them: `--threads` overrides it.
PREFIXES = ("MKL_", "ONEDNN_", "DNNL_")  # instruction sets, reproducibility, threads, precision, shortcuts
VARIABLES = (
    "ATEN_CPU_CAPABILITY",  # torch's own kernels: default, avx2, avx512
    "GLIBC_TUNABLES",  # hides CPU features from libm, whose scalar functions finish the tails of vectors
    "LD_PRELOAD",  # another OpenMP, libm or allocator
    # several on a line
    *["CUBLASLT_WORKSPACE_SIZE", "CUBLAS_EMULATION_STRATEGY", "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADDMM_CUDA_LT"],
    *["INTEL_ISA_DISABLE", "KMP_DETERMINISTIC_REDUCTION", "KMP_DYNAMIC_MODE", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC"],
    *["OMP_MAX_ACTIVE_LEVELS", "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS"],
    *["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_USE_HEURISTIC_MODE_B"],
    *["TORCH_CUDNN_V8_API_DISABLED", "TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM"],
    *["TORCH_MKLDNN_MATMUL_MIN_SIZE", "VECLIB_MAXIMUM_THREADS"],
)


def machine_record() -> dict[str, str]:
    """Returns the machine and this process's libraries as flat text; environment variables stand under their names."""
    builds = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    return {
        "python": platform.python_version(),
        "platform": platform.system(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "torch": torch.__version__,  # with its build: the package's metadata calls +cpu and +cu130 by one name
        "torch_commit": str(torch.version.git_version),
        **{name: version(name) for name in LIBRARIES},
        **_cpu(),
        **{key: next((line for line in builds if word in line), "none") for key, word in BUILDS.items()},
        "openmp_loaded": " ".join(_openmp_libraries()) or "unknown",
        **_accelerator(),
        **variables(),
    }


def variables() -> dict[str, str]:
    """Returns the environment variables set in this process that can move bits, by name."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or (name.startswith(PREFIXES) and "VERBOSE" not in name)
    }


def cpu_model() -> str:
    """Returns the processor's own name, with family, model and stepping where the system lists them."""
    fields: dict[str, str] = {}
    for line in _lines(PROC / "cpuinfo"):
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    parts = [f"{key} {fields[full]}" for key, full in CPU_PARTS.items() if full in fields]
    return f"{name} ({', '.join(parts)})" if parts else name


def parallel_threads() -> int:
    """Returns how many threads a parallel region gets now, by running one where the OpenMP library can be called.

    OMP_THREAD_LIMIT and OMP_DYNAMIC give a region fewer threads than `torch.get_num_threads()` says.
    """
    library = _torch_library()
    seen: list[int] = []  # one entry per thread of the region
    try:
        count = library.omp_get_num_threads
        body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(count()))
        library.GOMP_parallel(body, None, 0, 0)  # 0: as many threads as torch has set
    except AttributeError:  # no OpenMP, or one without GNU's entry point
        return torch.get_num_threads()
    return len(seen)


def _cpu() -> dict[str, str]:
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    features = [name for name, has in found.items() if has is True]
    if not features:  # a torch without that function
        flags = next((line for line in _lines(PROC / "cpuinfo") if line.startswith(("flags", "Features"))), "")
        features = flags.partition(":")[2].split()
    caches = [f"{name} {found[name]}" for name in ("l1d_cache_size", "l2_cache_size") if name in found]
    return {
        "cpu": cpu_model(),
        "cpu_features": " ".join(sorted(features)),
        "cpu_caches": ", ".join(caches) or "unknown",  # sums are cut in blocks that fit
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _accelerator() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"accelerator": "none"}
    major, minor = torch.cuda.get_device_capability(0)
    wheels = {str(one.metadata["Name"]).lower(): one.version for one in distributions()}
    return {
        "accelerator": torch.cuda.get_device_name(0),
        "compute_capability": f"{major}.{minor}",
        "cuda_driver": next(iter(_lines(PROC / "driver" / "nvidia" / "version")), "unknown"),
        "cuda_runtime": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        **{name: wheels[name] for name in sorted(wheels) if name.startswith(CUDA_PARTS)},
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _openmp_libraries() -> list[str]:
    """Returns the file names of the OpenMP libraries mapped into this process, as far as the system lists them."""
    names = {line.rpartition("/")[2] for line in _lines(PROC / "self" / "maps") if "/" in line}
    # by their beginning: scipy has modules named _decomp, which may be loaded at any time
    return sorted(name for name in names if name.startswith(("libgomp", "libiomp", "libomp")))


@cache
def _torch_library() -> Any:
    """Returns a handle through which the OpenMP functions that torch itself calls can be reached."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            return ctypes.CDLL(str(path))
    return ctypes.CDLL(None)
