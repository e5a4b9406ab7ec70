"""An adapted checkpoint computes what its base computes, bit for bit, from one file or from shards."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.kv import KVCache
from minimodel import Decoder, load_model
from minimodel.bits import same_bits
from tests.conftest import numeric
from tests.experiments.adapt.bases import EMBED, HEAD, adapted, shard, write_base
from tests.helpers import edit_json


@torch.inference_mode()
def plain_run(model: Decoder, tokens: list[int], whole: bool) -> dict[str, torch.Tensor]:
    """Hidden states, logits and K/V under an ordinary causal mask; an adapted checkpoint is shown all six roles."""
    ids = torch.tensor([tokens])
    roles = None if model.role_embedding is None else torch.arange(len(tokens))[None] % 6
    positions, cache = torch.arange(len(tokens))[None], KVCache.for_model(model, 1, len(tokens))
    logits, states = [], []
    for part in [slice(0, len(tokens))] if whole else [slice(t, t + 1) for t in range(len(tokens))]:
        hidden = model(ids[:, part], None if roles is None else roles[:, part], positions[:, part], None, cache)
        states.append(hidden)
        logits.append(model.logits(hidden))
    held = {f"layer {layer} {name}": tensor for layer, name, tensor in cache.tensors()}
    return {**held, "hidden": torch.cat(states, 1), "logits": torch.cat(logits, 1)}


def widened(base: Path, out: Path, rows: int) -> Path:
    """The base with a head (and, tied, an embedding) of `rows` rows, the new ones zero: products of one shape."""
    shutil.copytree(base, out)
    weights = load_file(out / "model.safetensors")
    for name in (EMBED, HEAD):
        if name in weights:
            more = torch.zeros(rows - weights[name].shape[0], weights[name].shape[1], dtype=weights[name].dtype)
            weights[name] = torch.cat((weights[name], more))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    edit_json(out / "config.json", vocab_size=rows)
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("spare", "tied"), [(0, False), (0, True), (20, False), (5, True)])
def test_zero_role_rows_under_a_causal_mask_give_the_base_s_bits(
    tmp_path: Path, dtype: str, spare: int, tied: bool
) -> None:
    base = write_base(tmp_path / "base", spare, numeric(dtype).torch_dtype, tied)
    out = adapted(base, tmp_path / "out")
    rows = max(259 + spare, 259 + 12)
    wide = widened(base, tmp_path / "wide", rows)
    before, before_wide, after = (load_model(path, numeric(dtype)) for path in (base, wide, out))
    assert after.config.vocab_size == rows and before.role_embedding is None and after.role_embedding is not None
    tokens = [(7 * i * i + 3) % 257 for i in range(40)]
    for whole in (True, False):
        left, wide_left, right = (plain_run(model, tokens, whole) for model in (before, before_wide, after))
        for name in left:
            if name != "logits":
                assert same_bits(left[name], right[name]), f"{name} whole={whole}"
        # a head of more rows is another product, which may have other bits in the old columns (FP32 here has)
        mine, theirs = (side["logits"][..., :259].contiguous() for side in (right, wide_left))
        assert same_bits(mine, theirs), f"logits whole={whole}"
        if spare >= 12:
            assert same_bits(mine, left["logits"][..., :259].contiguous()), f"logits of the base itself whole={whole}"
    # the control: one role row that is not zero
    other = adapted(base, tmp_path / "random", "--role-std", 0.02)
    moved = plain_run(load_model(other, numeric(dtype)), tokens, True)
    assert not same_bits(moved["layer 0 key"], plain_run(before, tokens, True)["layer 0 key"])


def test_a_sharded_base_gives_the_same_file(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    whole = adapted(base, tmp_path / "whole")
    parts = adapted(shard(base, tmp_path / "shards"), tmp_path / "parts")
    left, right = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert set(left) == set(right) and all(same_bits(left[name], right[name]) for name in left)
    again = shard(whole, tmp_path / "again")  # an adapted checkpoint may be sharded too
    one, two = (load_model(path, numeric("bf16")) for path in (whole, again))
    tokens = list(range(30))
    assert all(
        same_bits(a, b) for a, b in zip(plain_run(one, tokens, True).values(), plain_run(two, tokens, True).values())
    )
