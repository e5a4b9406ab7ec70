"""The checks at load: equal copies keep equal bits, and invariant kernels are invariant, or the step is named."""

from itertools import count

import pytest
import torch

from cache import build_incremental, build_live, build_prefill
from minimodel import load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.bits import equal_copies, same_bits
from minimodel.config_file import read_config
from minimodel.errors import CopiesDiffer, InputError
from minimodel.invariant.attention import KEY_BLOCK
from minimodel.layers import SILU_KERNELS, silu_in_steps
from minimodel.linear import LINEAR_KERNELS
from minimodel.packed import why_not_packed
from minimodel.selfcheck import (
    LENGTH,
    cancelling_attention,
    copies_fault,
    invariance_fault,
    require_invariant,
    require_usable,
)
from tests import THREADS
from tests.conftest import numeric
from tests.helpers import flip_bit, random_tensor, refused
from tests.tiny import CONFIG, write_checkpoint

TINY = read_config(CONFIG)


@pytest.fixture(autouse=True)
def forgotten():
    """Each test checks anew and leaves nothing found under altered kernels."""
    for known in (copies_fault, invariance_fault):
        known.cache_clear()
    yield
    for known in (copies_fault, invariance_fault):
        known.cache_clear()


def altered(name, when):
    """An attention kernel that flips one bit of the second copy in the calls for which `when(query, keys)` holds."""
    kernel = ATTENTION_KERNELS[name]

    def attend(query, keys, values, mask, scaling):
        out = kernel(query, keys, values, mask, scaling).clone()
        if len(out) > 1 and when(query, keys):
            flip_bit(out, (1, 0, 0, 3))
        return out

    return attend


def always(query, keys):
    return True


def several_threads(query, keys):
    return torch.get_num_threads() > 1


def in_the_third_try():
    """Each try calls the kernel twice, in the layer and on sums that cancel."""
    calls = count(1)
    return lambda query, keys: keys.shape[2] == 433 and next(calls) > 4


@pytest.mark.parametrize(
    ("when", "call"),
    [
        (lambda query, keys: query.shape[2] == 1 and keys.shape[2] >= 1024, "queries 1, keys 1024"),
        (lambda query, keys: query.shape[2] == 1 and keys.shape[2] == 8, "queries 1, keys 8"),
        (lambda query, keys: query.shape[2] > 100, "queries 205, keys 205"),
        (lambda query, keys: query.shape[2] == 3, "queries 3, keys 3"),
        (in_the_third_try(), "queries 1, keys 433"),
    ],
)
def test_a_kernel_that_spoils_one_copy_is_named_with_its_call(when, call, monkeypatch):
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", when))
    place = f"bf16 on cpu, threads {THREADS}"
    with refused("two equal copies", "self_attn.attention (attention kernel repeat_kv)", call, place):
        require_usable(numeric("bf16"), TINY)
    require_usable(numeric("bf16", kernels="packed_gqa"), TINY)


def test_another_rounding_of_a_sum_is_found_though_ordinary_numbers_hide_it(monkeypatch):
    """The second copy's FP32 sums are larger by 1e-10: in BF16 this shows only where a sum is about as small."""
    real = ATTENTION_KERNELS["repeat_kv"]

    def nudged(query, keys, values, mask, scaling):
        out = real(*(one.float() for one in (query, keys, values)), mask, scaling)
        out[1:] += 1e-10
        return out.to(query.dtype)

    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    query, keys, values = cancelling_attention(numeric("bf16"), TINY, 1, 64)
    assert equal_copies(nudged(query, keys, values.abs() + 1, mask, 0.25)), "ordinary sums"
    assert not equal_copies(nudged(query, keys, values, mask, 0.25)), "sums that cancel"
    assert equal_copies(real(query, keys, values, mask, 0.25)), "control: the kernel itself"
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", nudged)
    with refused("self_attn.attention (attention kernel repeat_kv)"):
        require_usable(numeric("bf16"), TINY)
    monkeypatch.setattr("minimodel.selfcheck.cancelling_attention", ordinary_attention)
    copies_fault.cache_clear()
    require_usable(numeric("bf16"), TINY)  # the control: without sums that cancel the check sees nothing


def ordinary_attention(*given):
    query, keys, values = cancelling_attention(*given)
    return query, keys, values.abs() + 1


def test_chunks_are_tried_where_a_command_prefills_in_chunks(monkeypatch):
    monkeypatch.setitem(
        ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", lambda query, keys: 1 < query.shape[2] < keys.shape[2])
    )
    require_usable(numeric("bf16"), TINY)
    with refused("attention kernel repeat_kv", "queries 3, keys 64"):
        require_usable(numeric("bf16"), TINY, chunks=(1, 3))


def test_a_linear_kernel_that_looks_at_the_place_is_named(monkeypatch):
    plain = LINEAR_KERNELS["plain"]

    def by_place(parts):
        run = plain(parts)

        def rows(x):
            outs = run(x)
            flip_bit(outs[0], (len(x) - 1, -1, 0))
            return outs

        return rows

    monkeypatch.setitem(LINEAR_KERNELS, "plain", by_place)
    with refused("self_attn.q_proj (linear kernel plain)", "queries 2, keys 2"):
        require_usable(numeric("bf16"), TINY)


def test_the_remedy_was_tried_here(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    for name, remedy in (
        ("repeat_kv", "pass --attention eager"),
        ("eager", "pass --kernels invariant"),
        ("blocked", "no kernel or thread count that works here"),
    ):
        monkeypatch.setitem(ATTENTION_KERNELS, name, altered(name, always))
        copies_fault.cache_clear()
        with refused(remedy):
            require_usable(numeric("bf16"), TINY)


def test_mkls_reproducible_mode_is_offered_where_one_thread_has_no_fault(monkeypatch, fresh_threads):
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    real = ATTENTION_KERNELS["repeat_kv"]
    for mode, when, error, message in (
        (None, several_threads, CopiesDiffer, "set MKL_CBWR=AUTO before Python starts or pass --threads 1"),
        ("COMPATIBLE", several_threads, InputError, r"threads 2; pass --threads 1 \(other bits\)$"),  # the user's stays
        (None, always, InputError, "pass --attention eager"),  # one thread has the fault too
    ):
        monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", real)
        monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", when))
        monkeypatch.setenv("MKL_CBWR", mode) if mode else monkeypatch.delenv("MKL_CBWR", raising=False)
        copies_fault.cache_clear()
        with pytest.raises(error, match=message) as caught:
            require_usable(numeric("bf16", threads=2), TINY)
        assert type(caught.value) is error and torch.get_num_threads() == 2, "the contract stays in force"


def test_a_library_user_meets_it_at_load_unless_one_copy_is_enough(tiny_directory, monkeypatch):
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", always))
    with refused("two equal copies", "pass --attention eager"):
        load_model(tiny_directory, numeric("bf16"))
    load_model(tiny_directory, numeric("bf16"), copies=1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_invariant_kernels_pass_and_constructions_and_chunkings_agree_in_every_bit(
    tiny_directory, dtype, prompt, fresh_threads
):
    contract = numeric(dtype, kernels="invariant")
    model = load_model(tiny_directory, contract)
    contract.require_in_force()  # the checks try several thread counts
    live = build_live(model, prompt)
    others = [build_incremental(model, live.state), build_prefill(model, live.state, copies=1)]
    others += [build_prefill(model, live.state, chunk=chunk) for chunk in (None, 2, 3, 17, 33)]
    for other in others:
        for (_, _, mine), (_, _, its) in zip(live.cache.tensors(), other.cache.tensors()):
            assert same_bits(mine[:1].contiguous(), its[:1].contiguous())
        assert same_bits(live.logits[:1].contiguous(), other.logits[:1].contiguous())
    flip_bit(others[2].cache.values(1), (0, 0, 3, 0))
    assert not live.cache.equals(others[2].cache)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_default_constructions_do_not(tiny_directory, dtype, prompt):
    """The control: default kernels give the same prefix other bits in one call."""
    model = load_model(tiny_directory, numeric(dtype))
    live = build_live(model, prompt)
    assert not live.cache.equals(build_prefill(model, live.state).cache)


def silu_by_rows(x):
    out = silu_in_steps(x)
    if x.shape[1] == 1:
        flip_bit(out, (0, 0, 3))
    return out


@pytest.mark.parametrize(
    ("kernels", "name", "other", "dtype", "parts"),
    [
        (ATTENTION_KERNELS, "blocked", ATTENTION_KERNELS["repeat_kv"], "fp32", "kernel blocked|self_attn.attention"),
        (LINEAR_KERNELS, "tiled", LINEAR_KERNELS["plain"], "fp32", "self-check of linear kernel tiled|_proj"),
        (SILU_KERNELS, "tiled", silu_by_rows, "bf16", "the steps between the kernels|mlp.product|tokens 0 to 0"),
    ],
)
def test_another_kernel_under_an_invariant_name_is_named_at_load(
    tiny_directory, monkeypatch, kernels, name, other, dtype, parts
):
    monkeypatch.setitem(kernels, name, other)
    with refused("self-check of", dtype, *parts.split("|")):
        load_model(tiny_directory, numeric(dtype, kernels="invariant"))
    require_invariant(numeric(dtype), TINY)  # only kernels that claim invariance are checked


@pytest.mark.parametrize(
    ("when", "part"),
    [
        (lambda query, keys: torch.get_num_threads() == 2, "2 threads"),
        (lambda query, keys: len(query) == 1, "of 1 copies"),
        (lambda query, keys: query.shape[2] == 2, "tokens 3 to 4"),
        (lambda query, keys: keys.shape[2] < LENGTH and query.shape[2] == 1, "tokens 0 to 0"),
        (lambda query, keys: query.shape[2] == 1 and keys.shape[2] > KEY_BLOCK, f"tokens {KEY_BLOCK} to {KEY_BLOCK}"),
    ],
)
def test_a_row_whose_bits_follow_the_call_is_found_in_each_kind_of_call(monkeypatch, when, part):
    """Both copies move, so that they stay equal."""
    kernel = ATTENTION_KERNELS["blocked"]

    def attend(query, keys, *rest):
        out = kernel(query, keys, *rest).clone()
        for copy in range(len(out) if when(query, keys) else 0):
            flip_bit(out, (copy, -1, 0, 3))
        return out

    monkeypatch.setitem(ATTENTION_KERNELS, "blocked", attend)
    with refused("self-check of attention kernel blocked", part):
        require_usable(numeric("bf16", kernels="invariant"), TINY)


def test_a_tied_head_works_under_every_linear_kernel(tmp_path):
    directory = write_checkpoint(tmp_path / "tied", config={"tie_word_embeddings": True}, stock=True)
    hidden = random_tensor(2, 1, CONFIG["hidden_size"], dtype=torch.bfloat16)
    packs = not why_not_packed(torch.bfloat16, hidden.device)
    names = [name for name in LINEAR_KERNELS if packs or name != "packed"]
    logits = {name: load_model(directory, numeric("bf16", linear=name)).logits(hidden) for name in names}
    assert not packs or same_bits(logits["plain"], logits["packed"])
    torch.testing.assert_close(logits["plain"], logits["tiled"])
