"""The start-up self-check of invariant kernels: one layer of the model's own shapes, run in one call and in pieces.

Each kernel proves its own products as it is made (`proof`); this proves the layer that they stand in, with everything
between them: norms, rotation, SiLU, residual sums, and how the calls are cut.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from minimodel.attention_blocked import KEY_BLOCK, ROW_TILES
from minimodel.checkpoint import expected_shapes
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.numbers import same_bits
from minimodel.numerics import KERNELS, NumericContract
from minimodel.proof import thread_counts, threads

LENGTH = KEY_BLOCK + 24  # crosses a key block
VOCABULARY = 64  # the head is proven when its own weight is loaded
KEPT = "layers.0."


@lru_cache(maxsize=8)
def prove(numeric: NumericContract, config: ModelConfig) -> None:
    """Proves on this device, for this model's shapes, that a token's bits do not depend on its company.

    The tokens of one call [2, LENGTH] are computed again in chunks that cross every tile and block edge, down to one
    token, as one copy and two, under one and two threads and the contract's own count; every step of the layer, K/V and
    the logits must keep their bits. InputError names the first step that does not, its kernel and the call's shape.
    """
    assert (numeric.attention, numeric.linear) == KERNELS["invariant"], "only invariant kernels claim invariance"
    model = _random_layer(numeric, config)
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
                        _require_equal(part, whole, start, stop, copies, numeric)


def _chunks(config: ModelConfig) -> list[tuple[int, int]]:
    """Cuts of the call: single tokens at every kind of place, and chunks over the edges of row tiles and key blocks."""
    small = max(1, ROW_TILES[0] // config.num_key_value_groups)
    large = max(1, ROW_TILES[1] // config.num_key_value_groups)
    singles = [0, 5, 6, 37, KEY_BLOCK - 1, KEY_BLOCK, LENGTH - 1]
    widths = sorted({2, 3, small, small + 1, 33, min(large + 1, LENGTH - 3)})
    return [(i, i + 1) for i in singles] + [(3, 3 + w) for w in widths] + [(KEY_BLOCK - 7, LENGTH), (0, LENGTH)]


class _Held:
    """A cache of one layer that starts from the first `start` tokens of an earlier run."""

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
    model: Decoder, tokens: Tensor, mask: Tensor, whole: dict[str, Tensor] | None, start: int
) -> dict[str, Tensor]:
    """Every observed step of tokens [B, stop] from `start` on, the logits, and the K/V held after it."""
    copies, stop = tokens.shape
    found: dict[str, Tensor] = {}
    cache = _Held(whole, start, copies)
    positions = torch.arange(stop, device=tokens.device).expand(copies, -1)
    part = mask[:, :, start:stop, :stop].expand(copies, -1, -1, -1)
    hidden = model(tokens[:, start:], None, positions[:, start:], part, cache, found.__setitem__)
    model.logits(hidden, found.__setitem__)
    assert cache.kept is not None, "the layer appends to its cache"
    return {**found, "keys": cache.kept[0], "values": cache.kept[1]}


def _require_equal(
    part: dict[str, Tensor], whole: dict[str, Tensor], start: int, stop: int, copies: int, numeric: NumericContract
) -> None:
    for name, mine in part.items():
        if name in ("keys", "values"):
            theirs = whole[name][:copies, :, :stop]
        elif name.endswith("_rotary"):
            theirs = whole[name][:copies, :, start:stop]
        else:
            theirs = whole[name][:copies, start:stop]
        if not same_bits(mine.contiguous(), theirs.contiguous()):
            raise InputError(
                f"self-check of {_kernel(name, numeric)} at {name.removeprefix(KEPT)}, {list(mine.shape)} "
                f"{numeric.dtype} on {numeric.device}, {torch.get_num_threads()} threads: expected tokens {start} to "
                f"{stop - 1} of {copies} copies to have the bits of one call of {LENGTH}, found others"
            )


def _kernel(step: str, numeric: NumericContract) -> str:
    if step.endswith("_proj") or step == "logits":
        return f"linear kernel {numeric.linear}"
    return f"attention kernel {numeric.attention}" if step.endswith(".attention") else "the steps between the kernels"


def _random_layer(numeric: NumericContract, config: ModelConfig) -> Decoder:
    """One layer of the model's shapes over a small vocabulary, every parameter random."""
    config = replace(config, num_hidden_layers=1, vocab_size=VOCABULARY, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in expected_shapes(config).items():
        weight = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        weight = 1 + weight / 4 if "norm" in name else weight * shape[-1] ** -0.5
        weights[name] = weight.to(numeric.torch_dtype).to(numeric.torch_device)
    del weights["lm_head.weight"]
    return Decoder(config, weights, numeric)
