"""Everything that differs between transformers releases, found out in this one file.

Releases known: 4.46 to 5.24. Where an interface shows what it takes, it is inspected; only the attention path and the
spelling of from_pretrained's dtype go by the version number.
"""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minimodel.errors import InputError, refuse

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: every model here is a local directory

try:
    import transformers
except ImportError:
    print("error: transformers: expected an installed release, found none; pip install -e '.[test]'", file=sys.stderr)
    raise SystemExit(2) from None
from transformers.models.qwen2 import modeling_qwen2 as modeling_qwen2

CACHE = ("cache", "past_key_values", "past_key_value")  # names of the argument: 5.24; before; 4.46's layers
LAST_LOGITS = ("logits_to_keep", "num_logits_to_keep")  # of the last N tokens only; the latter before 4.49
INSTALLED: str = transformers.__version__
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version text; InputError for a major that was never compared here."""
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise refuse("transformers version", "MAJOR.MINOR...", version)
    major, minor = int(parts[0]), int(parts[1])
    if major not in (4, 5) or (major, minor) < (4, 46):
        raise refuse("transformers version", "4.46 or later of major 4, or major 5", version)
    return major, minor


def matching_kernel(version: str = INSTALLED) -> str:
    """Our attention kernel with the bits of that release's SDPA path.

    Up to 5.22 `integrations/sdpa_attention.py` (4.46: `Qwen2SdpaAttention`) repeats the key/value heads; from 5.23 on a
    single masked query packs its heads onto them.
    """
    return "packed_gqa" if release(version) >= (5, 23) else "repeat_kv"


def other_kernel(version: str = INSTALLED) -> str:
    """The SDPA kernel that is not the matching one."""
    return "repeat_kv" if matching_kernel(version) == "packed_gqa" else "packed_gqa"


def load_arguments(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """from_pretrained's dtype (spelled torch_dtype before 4.56) and attention implementation."""
    return {"dtype" if release(INSTALLED) >= (4, 56) else "torch_dtype": dtype, "attn_implementation": attention}


def argument(forward: Callable[..., Any], names: tuple[str, ...]) -> str:
    """The one of `names` that `forward` takes."""
    parameters = inspect.signature(forward).parameters
    for name in names:
        if name in parameters:
            return name
    raise InputError(f"transformers {INSTALLED}: expected an argument {names[0]}, found {', '.join(parameters)}")


def new_cache() -> Any:
    """An empty DynamicCache: what generate() uses by default."""
    return transformers.DynamicCache()


def keys_and_values(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """(key, value) [B, H_kv, S, D] of every layer, the cache's own tensors.

    Reads `layers[i].keys` and `.values` (4.54 and later) or `key_cache` and `value_cache` (before). InputError names
    the version where neither is there.
    """
    layers = getattr(cache, "layers", None)
    if layers is not None and all(hasattr(layer, "keys") and hasattr(layer, "values") for layer in layers):
        return [(layer.keys, layer.values) for layer in layers]
    if hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        return list(zip(cache.key_cache, cache.value_cache))
    raise InputError(
        f"transformers {INSTALLED}: {type(cache).__name__}: expected layers[i].keys and .values, or key_cache and "
        "value_cache, found neither"
    )


def first_output(output: Any) -> Tensor:
    """A module's tensor: layers return a tuple before 4.54, a tensor later; attention always returns a tuple."""
    return output[0] if isinstance(output, tuple) else output
