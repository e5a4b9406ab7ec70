"""One request through our decoder or through transformers, in one call or token by token, and what must be equal."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import same_bits
from minimodel.decoder import Decoder
from tests.hf import versions
from tests.hf.inputs import Request
from tests.hf.reference import Reference


@dataclass(frozen=True)
class Run:
    """Named tensors in forward order: every layer's key and value, the hidden states and the logits of every call."""

    tensors: tuple[tuple[str, Tensor], ...]


def calls(length: int, construction: str) -> list[tuple[int, int]]:
    """(start, stop) of each call: one for "prefill", one a token for "incremental"; "chunks" mixes both."""
    if construction == "prefill":
        return [(0, length)]
    if construction == "incremental":
        return [(t, t + 1) for t in range(length)]
    assert construction == "chunks", construction
    half = length // 2
    return [(0, half), (half, length - 1), (length - 1, length)]


@torch.inference_mode()
def run_ours(model: Decoder, request: Request, construction: str) -> Run:
    """Logits only of each call's last token, on both sides: the number of rows can move the bits of a product."""
    cache = KVCache.for_model(model, request.input_ids.shape[0], request.length)
    outputs = []
    for start, stop in calls(request.length, construction):
        hidden = model(*request.call(start, stop), cache)
        outputs += [(f"hidden {start}", hidden), (f"logits {start}", model.logits(hidden[:, -1:]))]
    held = [(f"layer {layer} {name}", tensor) for layer, name, tensor in cache.tensors()]
    return Run((*held, *outputs))


@torch.inference_mode()
def run_theirs(reference: Reference, request: Request, construction: str) -> Run:
    cache = versions.new_cache()
    outputs = []
    for start, stop in calls(request.length, construction):
        hidden = reference.hidden(*request.call(start, stop), cache)
        outputs += [(f"hidden {start}", hidden), (f"logits {start}", reference.logits(hidden[:, -1:]))]
    held = [
        (f"layer {layer} {name}", tensor)
        for layer, pair in enumerate(versions.keys_and_values(cache))
        for name, tensor in zip(("key", "value"), pair)
    ]
    return Run((*held, *outputs))


def differing(left: Run, right: Run) -> list[str]:
    """Names of the tensors that are not equal in dtype, shape and raw bits, in order."""
    assert [name for name, _ in left.tensors] == [name for name, _ in right.tensors], "two different runs"
    return [name for (name, mine), (_, theirs) in zip(left.tensors, right.tensors) if not same_bits(mine, theirs)]
