"""Two equal copies keep equal bits, or the first step that gives them others is named before any row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minimodel import load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.errors import CopiesDiffer, InputError
from minimodel.linear import LINEAR_KERNELS
from minimodel.selfcheck import copies_fault, require_usable
from tests import THREADS
from tests.conftest import numeric
from tests.helpers import flip_bit, refused
from tests.minimodel.test_selfcheck import tiny_config


@pytest.fixture(autouse=True)
def forgotten():
    """Each test checks anew and leaves nothing found under altered kernels."""
    copies_fault.cache_clear()
    yield
    copies_fault.cache_clear()


def altered(name: str, when: Callable[[Tensor, Tensor], bool]) -> Callable[..., Tensor]:
    """An attention kernel that flips one bit of the second copy in the calls for which `when(query, keys)` holds."""
    kernel = ATTENTION_KERNELS[name]

    def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        out = kernel(query, keys, values, mask, scaling).clone()
        if len(out) > 1 and when(query, keys):
            flip_bit(out, (1, 0, 0, 3))
        return out

    return attend


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_one_thread_gives_equal_copies_equal_bits(dtype):
    require_usable(numeric(dtype), tiny_config())


@pytest.mark.parametrize(
    ("when", "call"),
    [
        (lambda query, keys: query.shape[2] == 1 and keys.shape[2] >= 1024, "queries 1, keys 1024"),
        (lambda query, keys: query.shape[2] == 1 and keys.shape[2] == 8, "queries 1, keys 8"),
        (lambda query, keys: query.shape[2] > 100, "queries 205, keys 205"),
        (lambda query, keys: query.shape[2] == 3, "queries 3, keys 3"),
    ],
)
def test_a_kernel_that_spoils_one_copy_is_named_with_its_call(when, call, monkeypatch):
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", when))
    with refused(
        "two equal copies", "self_attn.attention (attention kernel repeat_kv)", call, f"bf16 on cpu, threads {THREADS}"
    ):
        require_usable(numeric("bf16"), tiny_config())
    require_usable(numeric("bf16", kernels="packed_gqa"), tiny_config())


def test_a_linear_kernel_that_looks_at_the_place_is_named(monkeypatch):
    def by_place(weight, bias):
        run = plain(weight, bias)

        def rows(x):
            out = run(x)
            flip_bit(out, (len(out) - 1, -1, 0))
            return out

        return rows

    plain = LINEAR_KERNELS["plain"]
    monkeypatch.setitem(LINEAR_KERNELS, "plain", by_place)
    with refused("self_attn.q_proj (linear kernel plain)", "queries 2, keys 2"):
        require_usable(numeric("bf16"), tiny_config())


def test_the_remedy_was_tried_here(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", lambda query, keys: True))
    with refused("pass --attention eager"):
        require_usable(numeric("bf16"), tiny_config())
    monkeypatch.setitem(ATTENTION_KERNELS, "eager", altered("eager", lambda query, keys: True))
    copies_fault.cache_clear()
    with refused("pass --kernels invariant"):
        require_usable(numeric("bf16"), tiny_config())
    monkeypatch.setitem(ATTENTION_KERNELS, "blocked", altered("blocked", lambda query, keys: True))
    copies_fault.cache_clear()
    with refused("no kernel or thread count that works here"):
        require_usable(numeric("bf16"), tiny_config())


def several_threads(query: Tensor, keys: Tensor) -> bool:
    return torch.get_num_threads() > 1


def test_mkls_reproducible_mode_is_offered_where_one_thread_has_no_fault(monkeypatch, fresh_threads):
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", several_threads))
    with pytest.raises(CopiesDiffer, match="set MKL_CBWR=AUTO before Python starts or pass --threads 1"):
        require_usable(numeric("bf16", threads=2), tiny_config())
    assert torch.get_num_threads() == 2, "the contract stays in force"
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(InputError, match=r"threads 2; pass --threads 1 \(other bits\)$") as caught:
        require_usable(numeric("bf16", threads=2), tiny_config())
    assert not isinstance(caught.value, CopiesDiffer), "the user's mode stays"
    monkeypatch.undo()
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", lambda query, keys: True))
    copies_fault.cache_clear()
    with pytest.raises(InputError, match="pass --attention eager") as caught:
        require_usable(numeric("bf16", threads=2), tiny_config())
    assert not isinstance(caught.value, CopiesDiffer), "one thread has the fault too"


def test_a_library_user_meets_it_at_load_unless_one_copy_is_enough(tiny_directory, monkeypatch):
    monkeypatch.setitem(ATTENTION_KERNELS, "repeat_kv", altered("repeat_kv", lambda query, keys: True))
    with refused("two equal copies", "pass --attention eager"):
        load_model(tiny_directory, numeric("bf16"))
    load_model(tiny_directory, numeric("bf16"), copies=1)
