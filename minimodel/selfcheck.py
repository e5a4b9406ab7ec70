"""The checks at load, on one random layer of the model's own shapes: equal copies, and invariant kernels.

Every kernel must give two equal copies of a request equal bits. A library may not, where its sums follow the alignment
of each thread's memory. Invariant kernels check their own products when they are made (`invariant.checks`); here the
layer around them is checked too: norms, rotation, SiLU, residual sums, and how the calls are cut.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from minimodel.bits import same_bits
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import CopiesDiffer, InputError
from minimodel.invariant.attention import KEY_BLOCK, ROW_TILES
from minimodel.invariant.checks import thread_counts, threads
from minimodel.numerics import KERNELS, NumericContract

LENGTH = KEY_BLOCK + 24  # crosses a key block
VOCABULARY = 64  # invariant kernels check the head when its own weight is loaded
BLOCK = 1 << 20  # random numbers drawn for a weight; a larger one repeats them
KEPT = "layers.0."
PREFILLS = (2, 3, 5, 37, 205)  # tokens of a call on an empty cache
KEYS = (1, 8, 64, 205, 433, 1024)  # keys that one token attends to, itself included
TRIES = 3  # of each call: the memory of a thread lies elsewhere each time
REPRODUCIBLE = {"MKL_CBWR": "AUTO"}  # MKL's conditional numerical reproducibility, read when torch loads


def require_usable(numeric: NumericContract, config: ModelConfig) -> None:
    """Puts the contract in force and checks that rows can be decoded under it on this device.

    CopiesDiffer, or InputError for a kernel that this device does not have, names the step and what works instead.
    """
    numeric.apply()
    fault = copies_fault(numeric, config)
    if fault:
        again = reproducible_may_help(numeric, config)
        numeric.apply()
        raise (CopiesDiffer if again else InputError)(f"{fault}; {_remedy(numeric, config, again)}")
    if (numeric.attention, numeric.linear) == KERNELS["invariant"]:
        require_invariant(numeric, config)


def _remedy(numeric: NumericContract, config: ModelConfig, again: bool) -> str:
    """Returns what may help (MKL's mode, if `again`) and what was tried here and works, as a phrase."""
    found = [f"set {name}={value} before Python starts" for name, value in REPRODUCIBLE.items() if again]
    others = {
        "--threads 1": {"threads": 1},
        "--attention eager": {"kernels": f"eager/{numeric.linear}"},
        "--linear plain": {"kernels": f"{numeric.attention}/plain"},
        "--kernels invariant": {"kernels": "invariant"},
    }
    for option, change in others.items():
        other = replace(numeric, **change)  # type: ignore[arg-type]
        try:
            other.apply()
            if other != numeric and not copies_fault(other, config):
                found.append(f"pass {option} (other bits)")
                break
        except InputError:  # not here either
            continue
    numeric.apply()
    return " or ".join(found) or "found no kernel or thread count that works here"


def reproducible_may_help(numeric: NumericContract, config: ModelConfig) -> bool:
    """Returns whether MKL computes here, its reproducible mode is not chosen yet, and one thread has no fault.

    The mode takes away what follows from where a thread's memory lies; an order that follows a row's place stays.
    """
    if numeric.threads == 1 or not torch.backends.mkl.is_available() or set(REPRODUCIBLE) & set(os.environ):
        return False
    one = replace(numeric, threads=1)
    one.apply()
    return not copies_fault(one, config)


@lru_cache(maxsize=64)
def copies_fault(numeric: NumericContract, config: ModelConfig) -> str:
    """Returns the first step at which two equal copies differ in bits, with its call; empty where they keep equal bits.

    Tried: prefills, and single tokens over few and many keys. The contract must be in force.
    """
    model = _random_layer(numeric, config, config.vocab_size)
    with torch.inference_mode():
        for start, stop in _copied_calls(config):
            mask = torch.ones(stop, stop, dtype=torch.bool, device=numeric.torch_device).tril()[None, None]
            generator = torch.Generator().manual_seed(6)
            tokens = torch.randint(VOCABULARY, (1, stop), generator=generator, device="cpu")
            held = _random_cache(numeric, config, start)
            for _ in range(TRIES):
                steps = _steps(model, tokens.to(numeric.torch_device).expand(2, -1), mask, held, start, last=True)
                name = next((n for n, t in steps.items() if not same_bits(t[0].contiguous(), t[1].contiguous())), "")
                if name:
                    call = f"queries {stop - start}, keys {stop}"
                    kind = f"{numeric.dtype} on {numeric.device}, threads {numeric.threads}"
                    step = f"{name.removeprefix(KEPT)} ({_kernel(name, numeric)})"
                    return f"two equal copies get different bits at {step}, {call}, {kind}"
    return ""


def _copied_calls(config: ModelConfig) -> Iterator[tuple[int, int]]:
    limit = config.max_position_embeddings
    yield from ((0, stop) for stop in PREFILLS if stop <= limit)
    yield from ((stop - 1, stop) for stop in KEYS if stop <= limit)


def _random_cache(numeric: NumericContract, config: ModelConfig, length: int) -> dict[str, Tensor]:
    """Returns the keys and values [2, H_kv, length, D] of two equal copies."""
    generator = torch.Generator().manual_seed(7)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for name in ("keys", "values")
    }
    return {name: one.to(numeric.torch_dtype).to(numeric.torch_device).repeat(2, 1, 1, 1) for name, one in made.items()}


@lru_cache(maxsize=8)
def require_invariant(numeric: NumericContract, config: ModelConfig) -> None:
    """Checks that invariant kernels are invariant here; InputError with `invariance_fault`'s text where not."""
    assert (numeric.attention, numeric.linear) == KERNELS["invariant"], "only invariant kernels claim invariance"
    if fault := invariance_fault(numeric, config):
        raise InputError(fault)


def invariance_fault(numeric: NumericContract, config: ModelConfig) -> str:
    """Returns the first step whose bits depend on the rest of the call, with its kernel and shape; empty where none do.

    The tokens of one call [2, LENGTH] are computed again in chunks that cross every tile and block edge, down to one
    token, as one copy and two, under one and two threads and the contract's own count; every step of the layer, K/V and
    the logits must keep their bits.
    """
    model = _random_layer(numeric, config, VOCABULARY)
    three, four = (torch.Generator().manual_seed(seed) for seed in (3, 4))
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=three, device="cpu").to(numeric.torch_device)
    drawn = torch.rand(LENGTH, LENGTH, generator=four, dtype=torch.float32, device="cpu")
    mask = (drawn < 0.8).tril().fill_diagonal_(True)
    mask[5] = False  # a row that may attend to nothing, as padding leaves it
    mask = mask[None, None].to(numeric.torch_device)
    with torch.inference_mode():
        with threads(1):
            whole = _steps(model, tokens.expand(2, -1), mask, None, 0)
        for count in thread_counts():
            with threads(count):
                for copies in (1, 2):
                    for start, stop in _chunks(config):
                        part = _steps(model, tokens[:, :stop].expand(copies, -1), mask, whole, start)
                        if fault := _difference(part, whole, start, stop, copies, numeric):
                            return fault
    return ""


def _chunks(config: ModelConfig) -> list[tuple[int, int]]:
    """Returns (start, stop) of each part: single tokens, and chunks across edges of row tiles and key blocks."""
    small = max(1, ROW_TILES[0] // config.num_key_value_groups)
    large = max(1, ROW_TILES[1] // config.num_key_value_groups)
    singles = [0, 5, 6, 37, KEY_BLOCK - 1, KEY_BLOCK, LENGTH - 1]
    widths = sorted({2, 3, small, small + 1, 33, min(large + 1, LENGTH - 3)})
    return [(i, i + 1) for i in singles] + [(3, 3 + w) for w in widths] + [(KEY_BLOCK - 7, LENGTH), (0, LENGTH)]


class _Held:
    """A cache of one layer that holds the first `start` tokens of an earlier run."""

    def __init__(self, whole: dict[str, Tensor] | None, start: int, copies: int) -> None:
        self.start, self.whole, self.copies = start, whole, copies
        self.kept: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return self.start

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.whole is not None:
            before = (self.whole[name][: self.copies, :, : self.start] for name in ("keys", "values"))
            keys, values = (torch.cat((old, new), dim=2) for old, new in zip(before, (keys, values)))
        self.kept = keys, values
        return keys, values


def _steps(
    model: Decoder, tokens: Tensor, mask: Tensor, whole: dict[str, Tensor] | None, start: int, last: bool = False
) -> dict[str, Tensor]:
    """Returns every observed step of tokens [B, stop] from `start` on, the logits, and the K/V held after the call.

    `last`: the logits are of the last token alone, as decoding takes them; all of a prefill's, over the model's own
    vocabulary, would be the largest tensor of the load.
    """
    copies, stop = tokens.shape
    found: dict[str, Tensor] = {}
    cache = _Held(whole, start, copies)
    positions = torch.arange(stop, device=tokens.device).expand(copies, -1)
    part = mask[:, :, start:stop, :stop].expand(copies, -1, -1, -1)
    hidden = model(tokens[:, start:], None, positions[:, start:], part, cache, found.__setitem__)
    model.logits(hidden[:, -1:] if last else hidden, found.__setitem__)
    assert cache.kept is not None, "the layer appends to its cache"
    return {**found, "keys": cache.kept[0], "values": cache.kept[1]}


def _difference(
    part: dict[str, Tensor], whole: dict[str, Tensor], start: int, stop: int, copies: int, numeric: NumericContract
) -> str:
    for name, mine in part.items():
        if name in ("keys", "values"):
            theirs = whole[name][:copies, :, :stop]
        elif name.endswith("_rotary"):
            theirs = whole[name][:copies, :, start:stop]
        else:
            theirs = whole[name][:copies, start:stop]
        if not same_bits(mine.contiguous(), theirs.contiguous()):
            return (
                f"self-check of {_kernel(name, numeric)} at {name.removeprefix(KEPT)}, {list(mine.shape)} "
                f"{numeric.dtype} on {numeric.device}, {torch.get_num_threads()} threads: expected tokens {start} to "
                f"{stop - 1} of {copies} copies to have the bits of one call of {LENGTH}, found others"
            )
    return ""


def _kernel(step: str, numeric: NumericContract) -> str:
    if step.endswith("_proj") or step == "logits":
        return f"linear kernel {numeric.linear}"
    return f"attention kernel {numeric.attention}" if step.endswith(".attention") else "the steps between the kernels"


def _random_layer(numeric: NumericContract, config: ModelConfig, vocabulary: int) -> Decoder:
    """Returns one layer of the model's shapes over `vocabulary` tokens, every parameter random, the head tied."""
    config = replace(config, num_hidden_layers=1, vocab_size=vocabulary, tie_word_embeddings=True)
    numeric = replace(numeric, device=numeric.device.split(",")[0])
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name == "lm_head.weight":
            continue
        count = min(math.prod(shape), BLOCK)
        block = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
        block = 1 + block / 4 if "norm" in name else block * shape[-1] ** -0.5
        block = block.to(numeric.torch_dtype).to(numeric.torch_device)
        whole = block.repeat(-(-math.prod(shape) // len(block)))[: math.prod(shape)]
        weights[name] = whole.view(shape)
    return Decoder(config, weights, numeric)
