"""The numeric contract: everything that may change a bit, chosen explicitly, put in force, and recorded."""

from dataclasses import dataclass
from typing import Any

import torch

from minimodel.attention import ATTENTION_KERNELS
from minimodel.errors import refuse
from minimodel.linear import LINEAR_KERNELS
from minimodel.process import in_force, put_in_force, wanted

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
KERNELS = {  # the short form: attention kernel, linear kernel
    "repeat_kv": ("repeat_kv", "plain"),
    "packed_gqa": ("packed_gqa", "plain"),
    "invariant": ("blocked", "tiled"),
}
DEFAULT_THREADS = 2


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
        if dtype not in DTYPES:
            raise refuse("dtype", " or ".join(DTYPES), dtype)
        if type(threads) is not int or not 1 <= threads <= 1024:
            raise refuse("threads", "an integer from 1 to 1024", threads)
        pair = _named_pair(kernels)
        pair = (attention or pair[0], linear or pair[1])
        if pair[0] not in ATTENTION_KERNELS:
            raise refuse("attention kernel", " or ".join(ATTENTION_KERNELS), pair[0])
        if pair[1] not in LINEAR_KERNELS:
            raise refuse("linear kernel", " or ".join(LINEAR_KERNELS), pair[1])
        _check_device(device)
        short = next((name for name, parts in KERNELS.items() if parts == pair), "/".join(pair))
        chosen = {"dtype": dtype, "device": device, "kernels": short, "threads": threads}
        for field, value in {**chosen, "reduced_precision": reduced_precision}.items():
            object.__setattr__(self, field, value)

    @property
    def attention(self) -> str:
        """The attention kernel's name, of `minimodel.attention.ATTENTION_KERNELS`."""
        return _named_pair(self.kernels)[0]

    @property
    def linear(self) -> str:
        """The linear kernel's name, of `minimodel.linear.LINEAR_KERNELS`."""
        return _named_pair(self.kernels)[1]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, activations, K/V and logits."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """Where inputs, masks and logits lie: the first device."""
        return self.torch_devices[0]

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """All devices, in the order in which layers are placed over them."""
        return tuple(torch.device(name) for name in self.device.split(","))

    def apply(self) -> None:
        """Puts the process-wide settings in force, whatever the caller had set (see `process`)."""
        put_in_force(*self._settings)

    @property
    def _settings(self) -> tuple[int, bool, bool]:
        """Threads, cuDNN's TF32, reduced precision: the arguments of `process.wanted` and `put_in_force`."""
        # the paper's surface leaves cuDNN's TF32 on in BF16 (the decoder calls no cuDNN operation); FP32 has it off
        return self.threads, self.dtype in ("bf16", "fp16"), self.reduced_precision

    def require_in_force(self) -> None:
        """InputError when something changed a setting since `apply`: the bits would no longer be this contract's."""
        settings = in_force()
        for name, expected in wanted(*self._settings).items():
            if settings[name] != expected:
                raise refuse(f"process setting {name}", f"{expected!r} as the numeric contract set it", settings[name])

    def record(self) -> dict[str, Any]:
        """What a manifest keeps: names chosen and settings as read back from the process."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "attention": self.attention,
            "linear": self.linear,
            **in_force(),
        }


def placement(device: str, layers: int) -> list[torch.device]:
    """The device of each decoder layer: as many consecutive layers on each device as on the others, one less at most.

    The embedding lies with the first layer; final norm and head with the last. InputError for more devices than layers.
    """
    devices = [torch.device(name) for name in device.split(",")]
    if len(devices) > layers:
        raise refuse("devices", f"at most one for each of {layers} layers", device)
    return [devices[layer * len(devices) // layers] for layer in range(layers)]


def _named_pair(kernels: str) -> tuple[str, str]:
    """(attention, linear) of a short form, or of ATTENTION/LINEAR. InputError for any other text."""
    if kernels in KERNELS:
        return KERNELS[kernels]
    attention, slash, linear = str(kernels).partition("/")
    if not slash:
        raise refuse("kernels", f"{' or '.join(KERNELS)} or ATTENTION/LINEAR", kernels)
    return attention, linear


def _check_device(names: str) -> None:
    kinds = set()
    for name in names.split(","):
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise refuse("device", "cpu, cuda or cuda:N", name) from None
        if device.type not in ("cpu", "cuda"):
            raise refuse("device", "cpu, cuda or cuda:N", name)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            devices = torch.cuda.device_count()
            raise refuse(
                "device", f"one of {devices} CUDA devices" if devices else "cpu, for there is no CUDA device", name
            )
        kinds.add("cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
    if len(kinds) > 1:  # one kernel name means other bits on another kind
        raise refuse("devices", "devices of one kind", ", ".join(sorted(kinds)))
