"""The start-up self-check, SiLU's two forms, and the invariant model end to end: caches equal however built."""

import pytest
import torch
import torch.nn.functional as F

from cache import build_incremental, build_live, build_prefill
from minimodel import NumericContract, load_model, selfcheck
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import bits, same_bits
from minimodel.config import ModelConfig
from minimodel.layers import SILU_KERNELS, silu_in_steps
from minimodel.linear import LINEAR_KERNELS
from minimodel.packed import why_not_packed
from minimodel.selfcheck import require_invariant
from tests import THREADS
from tests.conftest import numeric
from tests.helpers import flip_bit, random_tensor, refused
from tests.tiny import CONFIG, write_checkpoint

DTYPES = ["bf16", "fp16", "fp32", "fp64"]


def tiny_config() -> ModelConfig:
    return ModelConfig.from_dict(CONFIG)


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_kernels_pass(dtype):
    require_invariant(numeric(dtype, kernels="invariant", threads=max(THREADS, 2)), tiny_config())


def _check_with(monkeypatch: pytest.MonkeyPatch, contract: NumericContract) -> None:
    contract.apply()
    require_invariant.__wrapped__(contract, tiny_config())


def test_another_attention_under_the_name_is_named(monkeypatch):
    monkeypatch.setitem(ATTENTION_KERNELS, "blocked", ATTENTION_KERNELS["repeat_kv"])
    with refused("self-check of attention kernel blocked", "self_attn.attention", "fp32", "copies"):
        _check_with(monkeypatch, numeric("fp32", kernels="invariant"))


def test_another_linear_under_the_name_is_named(monkeypatch):
    monkeypatch.setitem(LINEAR_KERNELS, "tiled", LINEAR_KERNELS["plain"])
    with refused("self-check of linear kernel tiled", "_proj", "fp32"):
        _check_with(monkeypatch, numeric("fp32", kernels="invariant"))


def test_a_step_between_the_kernels_is_named(monkeypatch):
    def by_rows(x):
        out = silu_in_steps(x)
        if x.shape[1] == 1:
            flip_bit(out, (0, 0, 3))
        return out

    monkeypatch.setitem(SILU_KERNELS, "tiled", by_rows)
    with refused("the steps between the kernels", "mlp.product", "tokens 0 to 0"):
        _check_with(monkeypatch, numeric("bf16", kernels="invariant"))


def test_loading_runs_it_and_stops(tiny_directory, monkeypatch):
    require_invariant.cache_clear()
    monkeypatch.setitem(ATTENTION_KERNELS, "blocked", ATTENTION_KERNELS["eager"])
    with refused("self-check of attention kernel blocked"):
        load_model(tiny_directory, numeric("fp32", kernels="invariant"))
    require_invariant.cache_clear()


def test_it_leaves_the_thread_count(tiny_directory):
    contract = numeric("bf16", kernels="invariant", threads=1)
    require_invariant.cache_clear()
    load_model(tiny_directory, contract)
    contract.require_in_force()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constructions_and_chunkings_agree_in_every_bit(tiny_directory, dtype, prompt, fresh_threads):
    model = load_model(tiny_directory, numeric(dtype, kernels="invariant"))
    live = build_live(model, prompt)
    others = [
        build_incremental(model, live.state),
        build_prefill(model, live.state),
        build_prefill(model, live.state, copies=1),
    ]
    others += [build_prefill(model, live.state, chunk=chunk) for chunk in (1, 2, 3, 17, 33)]
    for other in others:
        first_copy = [tensor[:1] for _, _, tensor in live.cache.tensors()]
        assert all(same_bits(a.contiguous(), b[2][:1].contiguous()) for a, b in zip(first_copy, other.cache.tensors()))
        assert same_bits(live.logits[:1].contiguous(), other.logits[:1].contiguous())
    flip_bit(others[1].cache.values(1), (0, 0, 3, 0))
    assert not live.cache.equals(others[1].cache)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_default_constructions_do_not(tiny_directory, dtype, prompt):
    """The control: default kernels give the same prefix other bits in one call."""
    model = load_model(tiny_directory, numeric(dtype))
    live = build_live(model, prompt)
    assert not live.cache.equals(build_prefill(model, live.state).cache)


def test_a_tied_head_works_under_every_linear_kernel(tmp_path):
    directory = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    hidden = random_tensor(2, 1, CONFIG["hidden_size"], dtype=torch.bfloat16)
    packs = not why_not_packed(torch.bfloat16, hidden.device)
    names = [name for name in LINEAR_KERNELS if packs or name != "packed"]
    logits = {name: load_model(directory, numeric("bf16", linear=name)).logits(hidden) for name in names}
    assert not packs or same_bits(logits["plain"], logits["packed"])
    torch.testing.assert_close(logits["plain"], logits["tiled"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_silu_is_one_function_of_every_number(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    in_vectors, left_over = F.silu(x), F.silu(x.view(-1, 1)[:, [0, 0]][:, :1])  # strided: one number at a time
    assert same_bits(in_vectors, left_over.flatten()) and same_bits(silu_in_steps(x), in_vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_silu_depends_on_the_place_and_the_steps_do_not(dtype):
    x = random_tensor(20_000, dtype=dtype) * 3
    for function, moves in ((F.silu, True), (silu_in_steps, False)):
        alone = torch.cat([function(x[i : i + 1]) for i in range(2000)])
        assert bool((bits(function(x)[:2000]) != bits(alone)).any()) == moves
    torch.testing.assert_close(silu_in_steps(x), F.silu(x))


def test_only_invariant_kernels_are_checked():
    with pytest.raises(AssertionError):
        selfcheck.require_invariant(numeric("bf16"), tiny_config())
