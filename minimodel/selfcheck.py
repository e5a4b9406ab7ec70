"""The checks at load, on one random layer of the model's own shapes: equal copies, and invariant kernels.

Two equal copies of a request must get equal bits. They do not under a library whose order of sums follows the
alignment of each thread's memory. Invariant kernels check their own products when they are made (`invariant.checks`).
Here the whole layer is checked: norms, rotation, SiLU, residual sums, and how the kernels cut their calls.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from minimodel.bits import same_bits
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import CopiesDiffer, InputError
from minimodel.invariant.attention import KEY_BLOCK, ROW_TILES
from minimodel.invariant.checks import thread_counts, threads
from minimodel.numerics import NumericContract
from minimodel.roles import causal_mask

LENGTH = KEY_BLOCK + 24  # crosses a key block
VOCABULARY = 64  # of the invariance check's layer: invariant kernels check the real head when they load it
BLOCK = 1 << 20  # random numbers drawn per weight; a larger weight repeats them
LAYER = "layers.0."  # before every step's name
PREFILLS = (2, 3, 5, 37, 205)  # tokens of a call on an empty cache
KEYS = (1, 8, 64, 205, 433, 1024)  # keys that one token attends to, itself included
CHUNK_KEYS = (64, 205)  # keys that a chunk's last token attends to, where a command prefills in chunks
TRIES = 3  # of each call: a thread's scratch memory may lie elsewhere each time
REPRODUCIBLE = {"MKL_CBWR": "AUTO"}  # MKL's conditional numerical reproducibility, read when torch loads


def require_usable(numeric: NumericContract, config: ModelConfig, chunks: tuple[int, ...] = ()) -> None:
    """Puts the contract in force and checks that rows can be decoded under it on this device.

    chunks: lengths of the calls in which prefixes are prefilled, beside single tokens and whole prefills. Where copies
    differ, CopiesDiffer (if MKL's reproducible mode may help) or InputError names the step and what works instead.
    InputError also for a kernel that this device does not have.
    """
    numeric.apply()
    if fault := copies_fault(numeric, config, chunks):
        again = reproducible_may_help(numeric, config, chunks)
        raise (CopiesDiffer if again else InputError)(f"{fault}; {_remedy(numeric, config, again, chunks)}")
    require_invariant(numeric, config)


def require_invariant(numeric: NumericContract, config: ModelConfig) -> None:
    """InputError with `invariance_fault`'s text where kernels that claim invariance are not invariant here."""
    if numeric.invariant and (fault := invariance_fault(numeric, config)):
        raise InputError(f"{fault}; use --kernels repeat_kv")


def reproducible_may_help(numeric: NumericContract, config: ModelConfig, chunks: tuple[int, ...]) -> bool:
    """Returns whether MKL computes here, its reproducible mode is not chosen yet, and one thread has no fault.

    The mode removes differences that follow the place of a thread's memory. An order of sums that depends on a row's
    place in the call stays, and shows under one thread too.
    """
    if numeric.threads == 1 or not torch.backends.mkl.is_available() or set(REPRODUCIBLE) & set(os.environ):
        return False
    return _works(replace(numeric, threads=1), config, chunks)


def _remedy(numeric: NumericContract, config: ModelConfig, again: bool, chunks: tuple[int, ...]) -> str:
    """Returns what to type, as a phrase: MKL's mode, if `again`, and the first other option that works here."""
    found = [f"set {name}={value} before Python starts" for name, value in REPRODUCIBLE.items() if again]
    others = {
        "--threads 1": replace(numeric, threads=1),
        "--attention eager": replace(numeric, kernels=f"eager/{numeric.linear}"),
        "--linear plain": replace(numeric, kernels=f"{numeric.attention}/plain"),
        "--kernels invariant": replace(numeric, kernels="invariant"),
    }
    works = (option for option, other in others.items() if other != numeric and _works(other, config, chunks))
    if option := next(works, ""):
        found.append(f"pass {option} (other bits)")
    numeric.apply()
    return " or ".join(found) or "found no kernel or thread count that works here"


def _works(numeric: NumericContract, config: ModelConfig, chunks: tuple[int, ...]) -> bool:
    """Puts `numeric` in force; returns whether this device has its kernels and copies keep equal bits."""
    try:
        numeric.apply()
        return not copies_fault(numeric, config, chunks)
    except InputError:
        return False


@lru_cache(maxsize=64)
def copies_fault(numeric: NumericContract, config: ModelConfig, chunks: tuple[int, ...] = ()) -> str:
    """Returns the first step at which two equal copies differ in bits, with its call; empty where they keep equal bits.

    Tried: prefills, single tokens over few and many keys, and calls of `chunks` tokens after others. The attention
    kernel is also called on sums that cancel: with ordinary numbers, rounding to BF16 hides most differences. The
    contract must be in force.
    """
    model = _random_layer(numeric, config, config.vocab_size)
    calls = [*((0, stop) for stop in PREFILLS), *((stop - 1, stop) for stop in KEYS)]  # tokens start to stop - 1
    calls += [(stop - chunk, stop) for chunk in chunks for stop in CHUNK_KEYS if 1 < chunk < stop]
    for start, stop in calls:
        if stop > config.max_position_embeddings:
            continue
        mask = causal_mask(stop - start, stop, numeric.torch_device)  # [1, 1, T, S]
        tokens = _random_tokens(numeric, stop, seed=6)[:, start:].expand(2, -1)  # [2, T]
        held = random_kv(numeric, config, start, seed=7)
        query, keys, values = cancelling_attention(numeric, config, stop - start, stop)
        for _ in range(TRIES):
            with torch.inference_mode():
                steps = steps_of(model, tokens, mask, held, last=True)
                cancelled = model.attend(query, keys, values, mask.expand(2, -1, -1, -1), model.scaling)
            pairs = [*steps.items(), (f"{LAYER}self_attn.attention", cancelled)]
            name = next((n for n, t in pairs if not same_bits(t[0].contiguous(), t[1].contiguous())), "")
            if name:
                call = f"queries {stop - start}, keys {stop}"
                kind = f"{numeric.dtype} on {numeric.device}, threads {numeric.threads}"
                step = f"{name.removeprefix(LAYER)} ({_kernel(name, numeric)})"
                return f"two equal copies get different bits at {step}, {call}, {kind}"
    return ""


@lru_cache(maxsize=8)
@torch.inference_mode()
def invariance_fault(numeric: NumericContract, config: ModelConfig) -> str:
    """Returns the first step whose bits depend on the rest of the call, with its kernel and shape; empty where none do.

    One call of LENGTH tokens in two copies under one thread is computed again in parts, down to one token, that cross
    every tile and block edge: as one copy and two, under one and two threads and the contract's own count. Every step
    of the layer, K/V and logits must keep their bits.
    """
    model = _random_layer(numeric, config, VOCABULARY)
    tokens = _random_tokens(numeric, LENGTH, seed=3)
    drawn = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float32, device="cpu")
    mask = (drawn < 0.8).tril().fill_diagonal_(True)
    mask[5] = False  # a row that may attend to nothing, as padding leaves it
    mask = mask[None, None].to(numeric.torch_device)  # [1, 1, LENGTH, LENGTH]
    with threads(1):
        whole = steps_of(model, tokens.expand(2, -1), mask, random_kv(numeric, config, 0, seed=7))
    for count, copies, (start, stop) in product(thread_counts(), (1, 2), _chunks(config)):
        held = FixedCache(*(whole[name][:copies, :, :start] for name in ("keys", "values")))
        with threads(count):
            part = steps_of(model, tokens[:, start:stop].expand(copies, -1), mask[:, :, start:stop, :stop], held)
        if name := _differing(part, whole, start, stop, copies):
            return (
                f"self-check of {_kernel(name, numeric)} at {name.removeprefix(LAYER)}, {list(part[name].shape)} "
                f"{numeric.dtype} on {numeric.device}, {count} threads: expected tokens {start} to {stop - 1} of "
                f"{copies} copies to have the bits of one call of {LENGTH}, found others"
            )
    return ""


def _chunks(config: ModelConfig) -> list[tuple[int, int]]:
    """Returns (start, stop) of each part: single tokens, and chunks across edges of row tiles and key blocks."""
    groups = config.num_attention_heads // config.num_key_value_heads  # query heads per key/value head
    full = {max(1, tile // groups) for tile in ROW_TILES}  # tokens that fill a tile
    singles = [0, 5, 6, 37, KEY_BLOCK - 1, KEY_BLOCK, LENGTH - 1]  # token 5 may attend to nothing
    widths = sorted({min(width, LENGTH - 3) for width in {2, 3, 33} | full | {tokens + 1 for tokens in full}} - {1})
    return [(i, i + 1) for i in singles] + [(3, 3 + w) for w in widths] + [(KEY_BLOCK - 7, LENGTH), (0, LENGTH)]


def _differing(part: dict[str, Tensor], whole: dict[str, Tensor], start: int, stop: int, copies: int) -> str:
    """Returns the first step of tokens start to stop - 1 that has other bits in the whole call, "" if none has."""
    for name, mine in part.items():
        held = name in ("keys", "values")  # of all tokens up to stop, not of this part's alone
        axis = 2 if held or name.endswith("_rotary") else 1  # of the tokens: [B, heads, T, D], else [B, T, ...]
        first = 0 if held else start
        if not same_bits(mine.contiguous(), whole[name][:copies].narrow(axis, first, stop - first).contiguous()):
            return name
    return ""


def _kernel(step: str, numeric: NumericContract) -> str:
    """Returns which kernel computes a step, in words."""
    if step.endswith("_proj") or step == "logits":
        return f"linear kernel {numeric.linear}"
    return f"attention kernel {numeric.attention}" if step.endswith(".attention") else "the steps between the kernels"


def _random_tokens(numeric: NumericContract, length: int, seed: int) -> Tensor:
    """Returns token ids [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, length), generator=generator, device="cpu").to(numeric.torch_device)


def _random_layer(numeric: NumericContract, config: ModelConfig, vocabulary: int) -> Decoder:
    """Returns one layer of the model's shapes over `vocabulary` tokens, every parameter random."""
    generator = torch.Generator().manual_seed(5)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        block = torch.randn(min(count, BLOCK), generator=generator, dtype=torch.float32, device="cpu")
        block = (1 + block / 4 if "norm" in name else block * shape[-1] ** -0.5).to(numeric.torch_dtype)
        return block.repeat(-(-count // len(block)))[:count].view(shape)

    return one_layer(numeric, config, vocabulary, weight)


def one_layer(
    numeric: NumericContract, config: ModelConfig, vocabulary: int, weight: Callable[[str, tuple[int, ...]], Tensor]
) -> Decoder:
    """Returns one layer of the model's shapes over `vocabulary` tokens on the first device, the head tied.

    weight(name, shape) makes each of its weights on the CPU, in any dtype.
    """
    config = replace(config, num_hidden_layers=1, vocab_size=vocabulary, tie_word_embeddings=True)
    numeric = replace(numeric, device=numeric.device.split(",")[0])
    shapes = {name: shape for name, shape in expected_shapes(config).items() if name != "lm_head.weight"}
    weights = {name: weight(name, shape).to(numeric.torch_dtype) for name, shape in shapes.items()}
    return Decoder(config, {name: made.to(numeric.torch_device) for name, made in weights.items()}, numeric)


class FixedCache:
    """A cache of one layer that stays at `keys` and `values` [B, H_kv, n, D]: every `append` starts from these."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.held = self.after = keys, values  # after: with the tokens of the last call

    def __len__(self) -> int:
        return self.held[0].shape[2]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.after = torch.cat((self.held[0], keys), dim=2), torch.cat((self.held[1], values), dim=2)
        return self.after


def random_kv(numeric: NumericContract, config: ModelConfig, length: int, seed: int) -> FixedCache:
    """Returns a cache of `length` random tokens, the same in two copies."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, config.num_key_value_heads, length, config.head_dim)  # [1, H_kv, length, D]
    made = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for _ in "kv")
    keys, values = (one.to(numeric.torch_dtype).to(numeric.torch_device).repeat(2, 1, 1, 1) for one in made)
    return FixedCache(keys, values)


def cancelling_attention(
    numeric: NumericContract, config: ModelConfig, queries: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query [2, H, T, D], keys and values [2, H_kv, S, D], the same in two copies.

    Key tokens form random pairs of equal keys and opposite values; a token left over has the value 0. So the exact
    output of a query that sees all tokens is 0, and what a kernel returns is its rounding error, which differs between
    orders of summation.
    """
    generator, dim = torch.Generator().manual_seed(8), config.head_dim
    order = torch.randperm(length, generator=generator, device="cpu")
    first, second = order[: length // 2], order[length // 2 : length // 2 * 2]

    def random(heads: int, count: int) -> Tensor:  # [1, heads, count, D]
        return torch.randn((1, heads, count, dim), generator=generator, dtype=torch.float32, device="cpu")

    query, keys = random(config.num_attention_heads, queries), random(config.num_key_value_heads, length)
    values = torch.zeros_like(keys)
    values[:, :, first] = random(config.num_key_value_heads, len(first))
    keys[:, :, second], values[:, :, second] = keys[:, :, first], -values[:, :, first]
    dtype, device = numeric.torch_dtype, numeric.torch_device
    query, keys, values = (one.to(dtype).to(device).repeat(2, 1, 1, 1) for one in (query, keys, values))
    return query, keys, values


def steps_of(model: Decoder, tokens: Tensor, mask: Tensor, cache: FixedCache, last: bool = False) -> dict[str, Tensor]:
    """Returns every observed step of tokens [B, T] after the cache's, the logits, and the keys and values afterwards.

    `last`: the logits are of the last token alone, as in decoding. Those of a whole prefill over the model's own
    vocabulary would be the largest tensor of the load.
    """
    found: dict[str, Tensor] = {}
    copies, length = tokens.shape
    positions = torch.arange(len(cache), len(cache) + length, device=tokens.device).expand(copies, -1)
    hidden = model(tokens, None, positions, mask.expand(copies, -1, -1, -1), cache, found.__setitem__)
    model.logits(hidden[:, -1:] if last else hidden, found.__setitem__)
    return {**found, **dict(zip(("keys", "values"), cache.after))}
